"""hivemind in this process: started when a plan first needs it, and kept until the process ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from atoll.peer.averaging.hivemind_averager import HivemindAverager
from atoll.protocol.errors import ResourceError
from atoll.protocol.fault_points import FaultPoints
from atoll.protocol.hive import HivePlace

_logger = logging.getLogger("atoll.peer")


class HiveHolder:
    """``place`` says where the hive is to listen."""

    def __init__(self, place: Callable[[], HivePlace], chaos: FaultPoints) -> None:
        self._place = place
        self._chaos = chaos
        self._starting: asyncio.Task[HivemindAverager] | None = None

    async def get(self) -> HivemindAverager | None:
        """The one of this process; None where it cannot be had, which is logged."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(HivemindAverager.start(self._place(), self._chaos))
        starting = self._starting
        try:
            averager = await asyncio.shield(starting)
        except ResourceError as error:
            _logger.warning("%s", error)
            if self._starting is starting:
                self._starting = None  # the next plan may have more luck
            return None
        if averager.hive.is_running:
            return averager
        await self.close()
        return await self.get()

    async def close(self) -> None:
        """Ends it, if there is one."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()  # it does nothing to one that has started
        (started,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(started, HivemindAverager):
            await started.close()
