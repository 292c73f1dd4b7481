"""``python -m atoll.coordinator`` is the command `atoll`."""

from atoll.coordinator.cli.main import main

main()
