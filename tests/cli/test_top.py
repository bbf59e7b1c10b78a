"""`epserve top`: what a frame shows, at any width, and what happens when the service goes away."""

import asyncio
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from epserve.cli.top import BLOCKS, HEAT_COLUMNS, View, backends, duration, heat, phases, run, short, sized, sparkline
from epserve.errors import NotReady
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from tests.support.grpc_calls import connect, message
from tests.support.observed import sample, watched


def reply(**changes) -> pb.GetStatusReply:
    ranks = [
        pb.RankStatus(
            rank=rank, node="10.0.0.7", device="cuda:0", gpu_uuid="GPU-0123456789", experts=[2 * rank, 2 * rank + 1],
            tokens_done=20_000, alive=rank != 1, phase="experts", expert_tokens=[0, 100 * rank],
            phase_seconds={"experts": 6.0, "prepare": 3.0, "gate": 0.5, "finalize": 0.5}, late_compiles=2 * rank,
        )
        for rank in range(2)
    ]  # fmt: skip
    values = {
        "state": "serving", "generation": 3, "ranks": ranks, "queue_tokens": 1234, "uptime_s": 3700, "recoveries": 2,
        "rates": pb.Rates(tokens=56_789, requests=12.5, errors=0.25, steps=90), "replayed_requests": 1,
        "latency": pb.Latency(p50_ms=1.5, p90_ms=2.25, p99_ms=9.125, count=750), "server_version": "9.9",
    }  # fmt: skip
    return pb.GetStatusReply(**{**values, **changes})


def shown(view: View, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


def view_of(*replies: pb.GetStatusReply) -> View:
    view = View("host:1")
    for second, each in enumerate(replies):
        view.take(each, float(second))
    return view


class TestFrame:
    def test_it_has_the_numbers_of_the_service(self):
        text = shown(view_of(reply()))
        for wanted in (
            "epserve 9.9 at host:1", "SERVING", "up 1 h 1 min", "generation 3", "56.79k tokens/s", "12.5 requests/s",
            "0.25 errors/s", "p50 1.50 ms", "p90 2.25 ms", "p99 9.12 ms", "750 in the last minute", "queue 1234 tokens",
            "2 recoveries, 1 replays",
        ):  # fmt: skip
            assert wanted in text
        first, second = (line for line in text.splitlines() if "10.0.0.7" in line)
        assert re.search(r"0 +experts +10\.0\.0\.7 +cuda:0 GPU-0123 +20k +– +0 %", first)
        assert "experts 60% prepare 30%" in first
        assert "no answer" in second
        assert second.rstrip().count("█") == 1

    def test_tokens_a_second_of_a_rank_come_from_two_answers(self):
        later = reply()
        later.ranks[0].tokens_done += 500
        del later.ranks[1]
        assert re.search(r"20\.5k +500", shown(view_of(reply(), later)))
        restarted = reply()
        restarted.ranks[0].tokens_done = 3
        assert re.search(r" 3 +0 ", shown(view_of(reply(), restarted)))  # a counter that went back is no rate

    def test_a_wide_terminal_shows_which_experts_backend_each_rank_chose(self):
        status = reply()
        for rows, backend in ((1, "triton"), (4, "triton"), (64, "cutlass"), (256, "cutlass"), (1024, "triton")):
            status.ranks[0].experts_choices.add(rows=rows, backend=backend, microseconds={backend: 5.0})
        assert backends(status.ranks[0].experts_choices) == "triton, cutlass from 64, triton from 1024"
        assert "triton, cutlass from 64" in shown(view_of(status), 200)
        assert backends(status.ranks[1].experts_choices) == ""

    @pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
    def test_a_narrow_terminal_gets_fewer_columns_and_no_line_too_long(self, width):
        lines = shown(view_of(reply()), width).splitlines()
        assert max(map(len, lines)) <= width
        assert ("10.0.0.7" in "".join(lines)) == (width >= 120)
        if width >= 60:
            assert any("no answer" in line for line in lines)

    def test_a_service_without_ranks_or_requests_is_shown_too(self):
        empty = pb.GetStatusReply(state="starting")
        text = shown(view_of(empty))
        assert "STARTING" in text
        assert "p99 –" in text
        idle = reply(latency=pb.Latency())
        for rank in idle.ranks:
            del rank.expert_tokens[:]
            rank.phase_seconds.clear()
        assert "2 experts" in shown(view_of(idle))

    def test_the_last_frame_stays_when_there_is_no_answer(self):
        view = view_of(reply())
        view.trouble = "connection refused"
        text = shown(view)
        assert "no answer: connection refused" in text
        assert "SERVING" in text
        view.take(reply(state="recovering"), 9.0)
        assert "connection refused" not in shown(view)


class TestParts:
    def test_heat_says_by_height_what_it_says_by_colour(self):
        strip = heat([0, 50, 100], 100)
        assert strip.plain == BLOCKS[0] + BLOCKS[4] + BLOCKS[8]
        assert [str(span.style) for span in strip.spans] == ["blue", "green", "red"]
        assert heat([0, 0], 0).plain == BLOCKS[0] * 2

    def test_many_experts_share_columns_and_the_hottest_shows(self):
        loads = [1] * 288
        loads[100] = 1000
        strip = heat(loads, 1000)
        assert len(strip.plain) <= HEAT_COLUMNS
        assert strip.plain.count(BLOCKS[8]) == 1

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (12.345, "12.35"), (9999, "9999"), (10_000, "10k"), (2_500_000, "2.5M"), (7e9, "7G")],
    )
    def test_numbers_are_short(self, value, text):
        assert short(value) == text

    @pytest.mark.parametrize(
        ("seconds", "text"), [(5, "0 min 5 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h"), (59.9, "0 min 59 s")]
    )
    def test_durations_have_two_units(self, seconds, text):
        assert duration(seconds) == text

    @pytest.mark.parametrize(
        ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2560, "2.5 KiB"), (3 << 40, "3072 GiB")]
    )
    def test_bytes_have_a_unit(self, count, text):
        assert sized(count) == text

    def test_empty_values_have_a_form(self):
        assert (sparkline([]), sparkline([0.0, 0.0]), phases({})) == ("", BLOCKS[1] * 2, "–")


async def test_once_prints_one_frame_of_a_real_server():
    async with watched() as server, connect(server) as channel:
        for _ in range(3):
            await pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(10, 32)))
        sample(server)
        command = [sys.executable, "-m", "epserve", "top", server.address, "--once"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SERVING") == 1
    assert "tiny-moe" in done.stdout
    assert "3 in the last minute" in done.stdout


async def test_a_service_that_is_not_there_is_one_clear_error():
    with pytest.raises(NotReady):
        await asyncio.to_thread(
            run, "127.0.0.1:1", token=None, tls=None, interval_s=1.0, once=True, console=Console(file=io.StringIO())
        )


async def test_it_lives_in_a_terminal_until_ctrl_c_and_sees_the_service_go():
    async with watched() as server:
        sample(server)
        screen, terminal = pty.openpty()
        command = [sys.executable, "-m", "epserve", "top", server.address, "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
        )
        try:
            seen = await asyncio.to_thread(read_until, screen, "SERVING", 120)
            assert "\x1b[?1049h" in seen  # its own screen: the shell's stays as it was
            await server.stop()
            await asyncio.to_thread(read_until, screen, "no answer", 60)
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(read_until, screen, "\x1b[?1049l", 60)
            assert await asyncio.to_thread(process.wait, 60) == 130
        finally:
            process.kill()
            process.wait()
            os.close(screen)
            os.close(terminal)


def read_until(screen: int, wanted: str, timeout_s: float) -> str:
    seen, end = "", time.monotonic() + timeout_s
    while wanted not in seen:
        left = end - time.monotonic()
        assert left > 0, f"{wanted!r} did not appear in {seen[-2000:]!r}"
        if select.select([screen], [], [], left)[0]:
            seen += os.read(screen, 65536).decode(errors="replace")
    return seen
