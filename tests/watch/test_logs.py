"""Log lines: one object each, the request's id in all of them, no secrets."""

import asyncio
import dataclasses
import io
import json
import logging
import pathlib
import subprocess
import sys

import pytest
import torch

from epserve.process import logs
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import Frames, connect, message
from tests.support.observed import watched

PRINTED = """
import sys, threading, warnings
from epserve.process import logs

logs.configure("json")
logs.take_streams(stdout=True)
print("\\x1b[33m(raylet)\\x1b[0m A worker", "died", file=sys.stderr)
print("on stdout")
sys.stderr.write("half ")
threading.Thread(target=print, args=("of another thread",)).start()
sys.stderr.write("a line\\n")
warnings.warn("old\\nthing")
thread = threading.Thread(target=lambda: 1 / 0, name="t")
thread.start()
thread.join()
raise ValueError("at last, token=s3cr3t")
"""


def test_what_a_process_prints_is_json_too():
    done = subprocess.run([sys.executable, "-c", PRINTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    said = [(line["logger"], line["message"]) for line in lines]
    for one in [("stderr", "(raylet) A worker died"), ("stdout", "on stdout"), ("stderr", "half a line"),
                ("stdout", "of another thread"), ("epserve", "t ended: division by zero"),
                ("epserve", "uncaught: at last, token=***")]:  # fmt: skip
        assert one in said
    assert any(logger == "py.warnings" and "old\nthing" in message for logger, message in said)
    assert "ZeroDivisionError" in next(line["error"] for line in lines if "t ended" in line["message"])


def test_a_refusal_at_the_door_is_json_too(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: /nowhere/at/all}\nserver: {log_format: json}")
    command = [sys.executable, "-m", "epserve", "serve", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere/at/all" in [json.loads(line) for line in done.stderr.splitlines()][-1]["message"]


class TestLogs:
    def line(self, *args, form="json", name="epserve.server", **kwargs):
        stream, logger = io.StringIO(), logging.Logger(name)
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logs.JsonFormatter() if form == "json" else logs.TextFormatter())
        logger.addHandler(handler)
        logger.info(*args, **kwargs)
        return stream.getvalue()

    def test_values_are_json_and_no_reprs_and_secrets_are_hidden_by_their_names(self):
        @dataclasses.dataclass
        class Lost:
            ranks: tuple[int, ...]
            where: pathlib.Path
            token: str

        made = json.loads(
            self.line("lost=%s by=%s token=%s", Lost((0, 3), pathlib.Path("/a"), "s3cr3t"), {"b": {1}}, "s3cr3t")
        )
        assert made["lost"] == {"ranks": [0, 3], "where": "/a", "token": "***"}
        assert (made["by"], made["token"]) == ({"b": [1]}, "***")

    def test_a_line_is_one_object_with_the_values_that_its_template_names(self):
        token = logs.request_id.set("r-7")
        try:
            text = self.line("layer=%d status=%s %s ms=%.2f 100%%", 3, "OK", "two\nlines", 1.234)
        finally:
            logs.request_id.reset(token)
        assert text.count("\n") == 1
        made = json.loads(text)
        assert (made["request"], made["layer"], made["status"], made["ms"]) == ("r-7", 3, "OK", 1.234)
        assert made["message"] == "layer=3 status=OK two\nlines ms=1.23 100%"
        assert made["level"] == "info"

    def test_what_a_process_says_of_itself_is_in_every_line(self):
        for form, shown in (("json", '"rank": 3'), ("text", "[rank 3]")):
            stream = io.StringIO()
            logs.configure(form, stream=stream, members=lambda: {"rank": 3})
            logging.getLogger("epserve.pool").warning("hm")
            assert shown in stream.getvalue()

    def test_an_exception_is_a_member_of_its_line(self):
        try:
            raise ValueError("Bearer abc.defgh")
        except ValueError:
            made = json.loads(self.line("broke", exc_info=True))
        assert "ValueError: Bearer ***" in made["error"]

    @pytest.mark.parametrize("form", ["json", "text"])
    @pytest.mark.parametrize(
        "secret",
        ["authorization: Bearer s3cr3t-t0ken", "('authorization', 'Bearer s3cr3t-t0ken')", "token=s3cr3t-t0ken",
         '{"token": "s3cr3t-t0ken"}', "password: s3cr3t-t0ken", "Basic s3cr3t-t0ken",
         "authorization: s3cr3t-t0ken or so", "authorization: s3cr3t"],
    )  # fmt: skip
    def test_secrets_do_not_reach_the_log(self, form, secret):
        assert "s3cr3t" not in self.line("call with %s", secret, form=form)
        assert "s3cr3t" not in self.line(secret, form=form)

    def test_model_tokens_are_no_secret(self):
        refusal = "authorization: missing or unknown bearer token (server.tokens_file)"
        assert refusal in self.line("request=- status=UNAUTHENTICATED %s", refusal, form="text")
        assert "tokens=512 status=OK" in self.line("tokens=%d status=%s", 512, "OK", form="text")

    async def test_each_request_logs_its_own_id(self, caplog):
        caplog.set_level(logging.DEBUG, "epserve.server")
        seen = {}

        async def compute(batch):
            await asyncio.sleep(0.01)
            seen[batch.request_id] = logs.request_id.get()
            return batch.hidden

        async with watched(FakeEngine(compute)) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            calls = [stub.Forward(message(torch.ones(1, 32), request_id=f"id-{n}")) for n in range(5)]
            frames = Frames(channel)
            for number in range(5, 8):
                await frames.send(number, torch.ones(1, 32), request_id=f"id-{number}")
            await frames.replies(3)
            await asyncio.gather(*calls)
        assert seen == {f"id-{n}": f"id-{n}" for n in range(8)}
