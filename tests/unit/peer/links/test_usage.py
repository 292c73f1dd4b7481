"""What has come from a neighbour, and for how long it was coming."""

from __future__ import annotations

from atoll.peer.links.usage import Reception


def test_receiving_lasts_from_the_first_part_of_a_message_to_its_last() -> None:
    reception = Reception()
    reception.heard(0, 10.0, unfinished=True)
    reception.heard(60, 11.0, unfinished=True)
    reception.heard(40, 13.0, unfinished=False)
    reception.heard(0, 20.0, unfinished=True)
    reception.heard(5, 20.5, unfinished=False)
    assert (reception.num_bytes, reception.seconds) == (105, 3.5)


def test_the_time_after_a_message_broke_off_does_not_count() -> None:
    reception = Reception()
    reception.heard(60, 10.0, unfinished=True)
    reception.broke()
    reception.heard(0, 100.0, unfinished=True)
    reception.heard(40, 101.0, unfinished=False)
    assert reception.seconds == 1.0
