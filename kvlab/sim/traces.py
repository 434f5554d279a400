"""Request traces of real services, and our own files: whatever its format, a trace becomes a Workload.

    Azure LLM inference   CSV    TIMESTAMP,ContextTokens,GeneratedTokens            time of day
    BurstGPT              CSV    Timestamp, Request tokens, Response tokens, ...    seconds; answers of 0 tokens failed
    Mooncake              JSONL  timestamp, input_length, output_length, hash_ids   milliseconds; an id for 512 tokens
    ours                  JSONL  arrival_s, prompt_tokens, output_tokens, and what Workload.save writes besides

The format is told by the header or by the names in the first line. Times count from the first request.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from kvlab.sim.workload import NS, OWN_TOKENS, Arrival, Workload

MOONCAKE_BLOCK = 512
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
OURS = ("arrival_s", "prompt_tokens", "output_tokens")


class _Row:
    """One row of a trace: reads its fields, and names file and line where one is wrong."""

    def __init__(self, fields: dict[str, Any], place: str):
        self.fields = fields
        self.place = place

    def refuse(self, name: str, wanted: str) -> ValueError:
        value = self.fields.get(name)
        return ValueError(f"{self.place}: {name} is {'missing' if value is None else repr(value)}: {wanted}")

    def whole(self, name: str, least: int = 0) -> int:
        value = self.fields.get(name)
        try:
            number = float(value) if isinstance(value, str) else value
            if isinstance(number, bool) or number != int(number) or number < least:
                raise ValueError
            return int(number)
        except (TypeError, ValueError, OverflowError):
            raise self.refuse(name, f"use a whole number >= {least}") from None

    def ns(self, name: str, per_second: int) -> int:
        value = self.fields.get(name)
        try:
            if isinstance(value, bool):
                raise ValueError
            at = float(value)
            if not 0 <= at < 1e12:
                raise ValueError
        except (TypeError, ValueError):
            raise self.refuse(name, "use a number of seconds or milliseconds from 0 on") from None
        return round(at * (NS // per_second))

    def time_of_day(self, name: str) -> int:
        """2023-11-16 18:15:46.6805900 in ns since 1970; datetime alone would drop the seventh digit."""
        value = self.fields.get(name)
        try:
            whole, _, fraction = value.partition(".")
            zone = next((fraction[i:] for i, letter in enumerate(fraction) if not letter.isdigit()), "")
            digits = fraction.removesuffix(zone) if zone else fraction
            moment = datetime.fromisoformat(whole + zone if zone or "+" in whole else whole + "+00:00")
            return round(moment.timestamp()) * NS + int(digits[:9].ljust(9, "0"))
        except (AttributeError, TypeError, ValueError):
            raise self.refuse(name, "use a time such as 2023-11-16 18:15:46.6805900") from None

    def ids(self, name: str, size: int, prompt: int) -> tuple[int, ...]:
        value = self.fields.get(name, [])
        fits = isinstance(value, list) and all(type(i) is int and 0 <= i < OWN_TOKENS for i in value)
        if not fits:
            raise self.refuse(name, f"use a list of whole numbers from 0 to {OWN_TOKENS - 1}")
        if (len(value) - 1) * size >= prompt:
            raise ValueError(
                f"{self.place}: {name} has {len(value)} ids of {size} tokens for a prompt of {prompt}: give one for "
                f"each block that the prompt begins"
            )
        return tuple(value)


def read_trace(path: str | Path, name: str | None = None) -> Workload:
    """Read a trace of any of the formats above; ValueError names the file, the line and the remedy."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not a text file in UTF-8") from None
    rows = _json_rows(text, path) if text.lstrip().startswith("{") else _csv_rows(text, path)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path}: holds no request")
    readers = {AZURE: _azure, BURSTGPT: _burstgpt, MOONCAKE: _mooncake, OURS: _ours}
    known = [names for names in readers if all(field in first.fields for field in names)]
    if not known:
        formats = "; ".join(", ".join(names) for names in readers)
        raise ValueError(f"{first.place}: has the fields {', '.join(map(str, first.fields))}; known are: {formats}")
    return _gather(path, name, first, rows, readers[known[0]])


def _gather(path: Path, name: str | None, first: _Row, rows: Iterator[_Row],
            reader: Callable[[_Row, int], Arrival]) -> Workload:  # fmt: skip
    size = MOONCAKE_BLOCK if reader is _mooncake else 0
    arrivals, skipped = [], 0
    row: _Row | None = first
    while row is not None:
        if "prefix_block_size" in row.fields:
            own = row.whole("prefix_block_size", least=1)
            if size not in (0, own):
                raise row.refuse("prefix_block_size", f"it is {size} in the lines before; use one for all")
            size = own
        arrival = reader(row, len(arrivals))
        if arrival.prompt_tokens and arrival.output_tokens:
            arrivals.append(arrival)
        else:
            skipped += 1
        row = next(rows, None)
    if not arrivals:
        raise ValueError(f"{path}: holds no request of at least 1 prompt token and 1 output")
    start = min(arrival.at_ns for arrival in arrivals) if reader is not _ours else 0
    moved = [arrival._replace(at_ns=arrival.at_ns - start) for arrival in arrivals]
    return Workload(name or path.stem, moved, size or MOONCAKE_BLOCK, skipped)


def _azure(row: _Row, number: int) -> Arrival:
    at = row.time_of_day("TIMESTAMP")
    return Arrival(at, row.whole("ContextTokens"), row.whole("GeneratedTokens"), str(number))


def _burstgpt(row: _Row, number: int) -> Arrival:
    return Arrival(row.ns("Timestamp", 1), row.whole("Request tokens"), row.whole("Response tokens"), str(number))


def _mooncake(row: _Row, number: int) -> Arrival:
    prompt = row.whole("input_length")
    ids = row.ids("hash_ids", MOONCAKE_BLOCK, prompt)
    return Arrival(row.ns("timestamp", 1000), prompt, row.whole("output_length"), str(number), 0, ids)


def _ours(row: _Row, number: int) -> Arrival:
    request_id = row.fields.get("request_id", str(number))
    if not isinstance(request_id, str) or "#" in request_id:
        raise row.refuse("request_id", "use a string without '#'")
    priority = row.fields.get("priority", 0)
    if type(priority) is not int:
        raise row.refuse("priority", "use a whole number; smaller goes first")
    prompt = row.whole("prompt_tokens")
    size = row.whole("prefix_block_size", least=1) if row.fields.get("prefix_ids") else MOONCAKE_BLOCK
    ids = row.ids("prefix_ids", size, prompt)
    return Arrival(row.ns("arrival_s", 1), prompt, row.whole("output_tokens"), request_id, priority, ids)


def _csv_rows(text: str, path: Path) -> Iterator[_Row]:
    reader = csv.DictReader(text.splitlines())
    for fields in reader:
        place = f"{path}, line {reader.line_num}"
        if None in fields:
            raise ValueError(f"{place}: has more columns than the header")
        yield _Row(fields, place)


def _json_rows(text: str, path: Path) -> Iterator[_Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: is not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{place}: is {line.strip()[:40]!r}, not an object: write {{...}} on each line")
        yield _Row(fields, place)
