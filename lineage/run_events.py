"""Run events: the events of a run's journal as one file, as the ledger of a finished run keeps them."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence

from antiphon.core.errors import IntegrityError
from antiphon.core.status import Event

EVENTS_FILE = "events.jsonl.gz"


class EventPacker:
    """Packs events as compressed JSON lines; the same events give the same bytes.

    >>> packer = EventPacker()
    >>> packer.add([Event(1, 0.5, "run.finished", "{}")])
    >>> [event.kind for event in read_events(packer.finish())]
    ['run.finished']
    """

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(wbits=31)  # as gzip, without a time
        self._parts: list[bytes] = []
        self.seq = 0
        """The last event that was packed."""

    def add(self, events: Sequence[Event]) -> None:
        """Take the next events of the journal."""
        lines = (json.dumps([event.seq, event.at, event.kind, event.data_json]) for event in events)
        self._parts.append(self._compressor.compress("".join(f"{line}\n" for line in lines).encode()))
        self.seq = events[-1].seq if events else self.seq

    def finish(self) -> bytes:
        """Return all of them so far; more can be added."""
        return b"".join([*self._parts, self._compressor.copy().flush()])


def read_events(body: bytes) -> Iterator[Event]:
    """Yield the events that were packed, in order.

    Raises:
        IntegrityError: when the bytes are no packed events, or one is missing.
    """
    try:
        lines = gzip.GzipFile(fileobj=io.BytesIO(body))  # line by line: a long run's are larger than memory
        for number, line in enumerate(lines, start=1):
            seq, at, kind, data_json = json.loads(line)
            if seq != number:
                raise IntegrityError(f"the recorded events lack number {number}; take another copy of them")
            yield Event(seq, at, kind, data_json)
    except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
        raise IntegrityError(
            f"the bytes are no recorded events: {error}; take another copy of them"
        ) from error
