"""Log lines as text or JSON, with request ids and without secrets. Standard library only.

A template such as `"request=%s status=%s %s"` names its values, so the JSON form has them as members `request` and `status`
with their own types. Nothing has to be logged twice.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

request_id: ContextVar[str] = ContextVar("epserve_request_id", default="")
"""Id of the request that the present task works for. Every line that the task logs carries it."""
trace_id: ContextVar[str] = ContextVar("epserve_trace_id", default="")

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CREDENTIALS = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")
_PROSE = r"(?!(?<=authorization: )(?!bearer\b|basic\b)[a-z]+ [a-z]+\b)"
"""Excludes epserve's own refusals ("authorization: missing or unknown bearer token"). A header has a scheme or one word there."""
_NAMED = re.compile(rf"(?i)\b((?:token|password|secret|authorization)['\"]?\s*[=:]\s*){_PROSE}['\"]?[^\s,'\"]+")
_SECRET = re.compile(r"(?i)(?:token|password|secret|authorization)$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DIRECTIVE = re.compile(r"(?:(?P<name>[a-z_]+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[sdrfgxi])")


def redact(text: str) -> str:
    """Returns `text` without bearer tokens, passwords and text that looks like one."""
    return _NAMED.sub(r"\1***", _CREDENTIALS.sub(r"\1 ***", text))


Members = Callable[[], Mapping[str, Any]]
"""Further members of every line of a process, such as its rank."""


class TextFormatter(logging.Formatter):
    def __init__(self, members: Members = dict) -> None:
        super().__init__(TEXT)
        self._members = members

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        text += "".join(f" [{name} {value}]" for name, value in self._members().items())
        known = request_id.get()
        return f"{text} [request {known}]" if known and known not in text else text


class JsonFormatter(logging.Formatter):
    """Writes one object a line: time, level, logger, message, the template's named values, request, trace, error."""

    def __init__(self, members: Members = dict) -> None:
        super().__init__()
        self._members = members

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            **self._members(),
        }
        if request_id.get():
            line["request"] = request_id.get()
        if trace_id.get():
            line["trace"] = trace_id.get()
        for name, value in named_values(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=lambda value: redact(str(value)), ensure_ascii=False)


def named_values(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the values that the template puts behind `name=`."""
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    directives = [match for match in _DIRECTIVE.finditer(record.msg) if not match[0].endswith("%%")]
    if len(directives) != len(record.args):
        return {}
    pairs = zip(directives, record.args, strict=True)
    return {match["name"]: _plain(value, match["name"]) for match, value in pairs if match["name"]}


def configure(
    form: Literal["text", "json"] = "text",
    *,
    level: int | None = None,
    stream: TextIO | None = None,
    members: Members = dict,
) -> None:
    """Sets one handler of the root logger on `stream` (stderr by default), in the chosen form. It replaces an earlier one."""
    stderr = sys.stderr.real if isinstance(sys.stderr, _LogStream) else sys.stderr
    handler = logging.StreamHandler(stream or stderr)
    handler.setFormatter((JsonFormatter if form == "json" else TextFormatter)(members))
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each.formatter, TextFormatter | JsonFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    if level is not None:
        root.setLevel(level)


def is_json() -> bool:
    """Returns whether `configure` has chosen JSON."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def adopt(name: str) -> None:
    """Makes a library's logger write in the configured form instead of its own. No effect before `configure`."""
    if any(isinstance(each.formatter, TextFormatter | JsonFormatter) for each in logging.getLogger().handlers):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def take_streams(*, stdout: bool = False) -> None:
    """Sends all Python output of this process to the log, a line at a time: Ray's reports, warnings, tracebacks of threads.

    It is for a process whose log is JSON. Messages of native code and the dump of a crash bypass Python and stay unchanged.
    With `stdout` standard output goes to the log too.
    """
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: logging.getLogger("epserve").critical("uncaught: %s", error[1], exc_info=error)
    threading.excepthook = _thread_ended
    sys.stderr = _LogStream("stderr", sys.stderr)
    if stdout:
        sys.stdout = _LogStream("stdout", sys.stdout)


def _thread_ended(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
        name = given.thread.name if given.thread is not None else "a thread"
        error = (given.exc_type, given.exc_value, given.exc_traceback)
        logging.getLogger("epserve").error("%s ended: %s", name, given.exc_value, exc_info=error)


class _LogStream(io.TextIOBase):
    """A text stream that turns its lines into log records of the logger `name`."""

    def __init__(self, name: str, real: TextIO):
        self._log, self.real = logging.getLogger(name), real
        self._of_thread = threading.local()

    def write(self, text: str) -> int:
        mine = self._of_thread
        if getattr(mine, "busy", False):  # the log's own handler reports a failure
            return self.real.write(text)
        *lines, mine.rest = (getattr(mine, "rest", "") + text).split("\n")
        mine.busy = True
        try:
            for line in lines:
                if shown := _COLOURS.sub("", line).strip():
                    self._log.warning("%s", shown)
        finally:
            mine.busy = False
        return len(text)

    def flush(self) -> None:
        self.real.flush()

    def fileno(self) -> int:
        return self.real.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.real.encoding


def _plain(value: Any, name: str = "") -> Any:
    """Returns `value` as JSON has it: a record by its fields, a collection by its members, else text. Secrets are hidden."""
    if _SECRET.search(name):
        return "***"
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(member, str(key)) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(member) for member in value]
    return redact(str(value))
