"""What this DHT keeps: announcements of runs that are what they say. Imports hivemind, so import it where a directory is
opened."""

from __future__ import annotations

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.serializer import MSGPackSerializer

from atoll.protocol.announcement import MAX_BYTES, verified
from atoll.protocol.errors import WireError

_KEY = "atoll/run/"


def key_of(run: str) -> str:
    """Where statements about runs of this name are kept, each under its authority's fingerprint."""
    return f"{_KEY}{run}"


class AnnouncementsOnly(RecordValidatorBase):  # type: ignore[misc]
    """A node that has it keeps and passes on nothing else, so nobody can put something in a run's place there."""

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is a statement, signed by the authority under whose fingerprint it is kept, of the run whose key
        it is kept under."""
        if record.subkey is None or len(record.value) > 2 * MAX_BYTES:
            return False
        try:
            subkey, value = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
            statement = verified(value) if isinstance(value, bytes) else None
        except (WireError, ValueError, TypeError):
            return False
        if statement is None or subkey != statement.fingerprint.hex():
            return False
        return bool(record.key == DHTID.generate(source=key_of(statement.run)).to_bytes())
