"""``python -m atoll.peer`` is ``atoll-peer``."""

from atoll.peer.cli import main

main()
