"""The HTTP port and the status page: what it serves to whom, and what a browser shows of it."""

import asyncio
import base64
import gzip
import json
import os
import shutil
import socket
import ssl
import time

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from epserve.errors import ConfigError
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.server.watch.status_page import PAGE, READ_TIMEOUT_S, THREADS, content_policy
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import connect, message, until
from tests.support.observed import WatchedEngine, fetch, sample, watched

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--window-size=1240,1400",
    "--disable-dev-shm-usage",
)  # fmt: skip


async def ask(server, layer=1, tokens=10, times=3):
    async with connect(server) as channel:
        stub = pb_grpc.ExpertsStub(channel)
        for _ in range(times):
            await stub.Forward(message(torch.ones(tokens, 32), layer=layer))


class TestHttp:
    async def test_the_page_may_run_its_own_script_and_nothing_else(self):
        async with watched() as server:
            reply = await fetch(server.metrics_port, "/")
        assert reply.status == 200
        assert reply.body == PAGE.read_bytes()
        policy = reply.headers["Content-Security-Policy"]
        assert policy == content_policy(reply.text)
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["X-Frame-Options"] == "DENY"
        assert "src=" not in reply.text.replace("font-src=", "")
        assert "://" not in reply.text.replace("http://www.w3.org/2000/svg", ""), "the page fetches something"

    async def test_the_data_is_that_of_the_service(self):
        async with watched() as server:
            await ask(server, layer=1)
            await ask(server, layer=7, tokens=1)
            sample(server)
            made = json.loads((await fetch(server.metrics_port, "/status.json")).text)
        assert made["state"] == "serving"
        assert made["model"] == {"name": "tiny-moe", "family": "tiny", "experts": 8, "top_k": 3}
        assert [rank["load"] for rank in made["ranks"]] == [[0, 33, 66, 99], [132, 165, 198, 231]]
        assert made["heat"]["rows"] == ["layer 1", "layer 2", "layer 3", "layer 7"]
        assert made["heat"]["percent"][0] == made["heat"]["percent"][3] == [0, 29, 57, 86, 114, 143, 171, 200]
        assert made["heat"]["percent"][1] == [0] * 8
        assert made["latency"]["count"] == 6
        assert len({len(column) for column in made["series"].values()}) == 1

    async def test_the_data_of_a_large_service_stays_small(self):
        engine = WatchedEngine(layers=tuple(range(61)))
        ranks = [{"experts": tuple(range(rank * 36, rank * 36 + 36))} for rank in range(8)]
        expert_tokens = {layer: tuple(1_000_000_007 * (layer + n) for n in range(288)) for layer in range(61)}
        status = engine.status

        def large():
            made = status()
            rank = made.ranks[0]
            made.ranks = tuple(type(rank)(**{**vars(rank), "rank": n, **each}) for n, each in enumerate(ranks))
            made.expert_tokens = expert_tokens
            return made

        engine.status = large
        async with watched(engine) as server:
            for _ in range(700):
                sample(server)
            reply = await fetch(server.metrics_port, "/status.json", Accept_Encoding="gzip")
        assert reply.headers["Content-Encoding"] == "gzip"
        assert len(reply.body) < 150_000
        heat = json.loads(gzip.decompress(reply.body))["heat"]
        assert len(heat["rows"]) * len(heat["percent"][0]) <= 20_000

    async def test_health_follows_the_engine_and_life_does_not(self):
        engine = WatchedEngine()
        async with watched(engine) as server:
            assert (await fetch(server.metrics_port, "/healthz")).status == 200
            engine.set_state("recovering")
            reply = await fetch(server.metrics_port, "/healthz")
            assert (reply.status, reply.text) == (503, "recovering\n")
            assert (await fetch(server.metrics_port, "/livez")).status == 200

    async def test_a_server_that_drains_is_not_healthy_any_more(self):
        entered, finish = asyncio.Event(), asyncio.Event()

        async def compute(batch):
            entered.set()
            await finish.wait()
            return batch.hidden

        async with watched(FakeEngine(compute)) as server, connect(server) as channel:
            call = pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)))
            await entered.wait()
            stopping = asyncio.create_task(server.stop(grace=60))
            await until(server._calls.draining.is_set)
            reply = await fetch(server.metrics_port, "/healthz")
            finish.set()
            await call
            await stopping
        assert (reply.status, reply.text) == (503, "draining\n")

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", "/nothing", 404), ("GET", "/../config.py", 404), ("POST", "/", 405), ("DELETE", "/metrics", 405)],
    )
    async def test_nothing_else_is_served(self, method, path, status):
        async with watched() as server:
            assert (await fetch(server.metrics_port, path, method=method)).status == status

    async def test_head_has_no_body(self):
        async with watched() as server:
            reply = await fetch(server.metrics_port, "/status.json", method="HEAD")
        assert (reply.status, reply.body) == (200, b"")

    @pytest.mark.parametrize(
        ("host", "status"),
        [("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403)],
    )  # fmt: skip
    async def test_a_name_that_was_pointed_at_loopback_is_refused(self, host, status):
        async with watched() as server:
            assert (await fetch(server.metrics_port, "/status.json", Host=host)).status == status

    @pytest.mark.parametrize(
        ("authorization", "status"),
        [
            pytest.param("", 401, id="none"),
            pytest.param("Bearer wrong", 401, id="wrong"),
            pytest.param("Bearer boss", 200, id="an admin's token"),
            pytest.param("Bearer worker", 403, id="a client's token"),
            pytest.param("Basic " + base64.b64encode(b"anyone:boss").decode(), 200, id="as a browser sends it"),
            pytest.param("Basic %%%", 401, id="no base64"),
            pytest.param("Basic " + base64.b64encode(b"\xff\xfe").decode(), 401, id="no text"),
        ],
    )
    async def test_tokens_guard_everything_but_health(self, tmp_path, authorization, status):
        (tmp_path / "tokens").write_text("boss name=boss admin\nworker name=worker\n")
        async with watched(tokens_file=tmp_path / "tokens") as server:
            for path in ("/", "/status.json", "/metrics"):
                reply = await fetch(server.metrics_port, path, Authorization=authorization)
                assert reply.status == status, path
                assert ("WWW-Authenticate" in reply.headers) == (status == 401)
            assert (await fetch(server.metrics_port, "/healthz")).status == 200

    async def test_tls_and_client_certificates_hold_here_too(self, certificates):
        files = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
        async with watched(**files, tls_client_ca=certificates / "ca.pem") as server:
            context = ssl.create_default_context(cafile=certificates / "ca.pem")
            with pytest.raises(OSError):
                await fetch(server.metrics_port, "/livez", context=context)
            context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
            assert (await fetch(server.metrics_port, "/livez", context=context)).status == 200
            with pytest.raises(OSError):
                await fetch(server.metrics_port, "/livez")  # without TLS

    async def test_clients_that_say_nothing_do_not_keep_others_waiting(self):
        async with watched() as server:
            silent = [socket.create_connection(("127.0.0.1", server.metrics_port)) for _ in range(7)]
            try:
                assert (await asyncio.wait_for(fetch(server.metrics_port, "/livez"), 30)).status == 200
            finally:
                for each in silent:
                    each.close()

    async def test_connections_beyond_its_threads_are_not_accepted(self):
        async with watched() as server:
            before = len(os.listdir("/proc/self/fd"))
            silent = [socket.create_connection(("127.0.0.1", server.metrics_port)) for _ in range(50)]
            try:
                await asyncio.sleep(0.5)
                accepted = len(os.listdir("/proc/self/fd")) - before - len(silent)
                assert THREADS <= accepted <= THREADS + 2  # one waits for a thread
            finally:
                for each in silent:
                    each.close()
            assert (await asyncio.wait_for(fetch(server.metrics_port, "/livez"), 30)).status == 200

    async def test_it_stops_while_nobody_says_anything(self):
        async with watched() as server:
            silent = [socket.create_connection(("127.0.0.1", server.metrics_port)) for _ in range(2 * THREADS)]
            await asyncio.sleep(0.2)
            before = time.monotonic()
        for each in silent:
            each.close()
        assert time.monotonic() - before < READ_TIMEOUT_S / 2

    async def test_a_port_in_use_is_a_configuration_error(self):
        taken = socket.create_server(("127.0.0.1", 0))
        with taken, pytest.raises(ConfigError, match=r"server\.metrics_port.*choose another port"):
            async with watched(metrics_port=taken.getsockname()[1]):
                pass

    async def test_there_is_no_port_unless_asked_for(self):
        async with watched(metrics_port=None) as server:
            assert server.metrics_port == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is not installed (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser):
    """A page with data whose service is gone, so that a script can put other data in without a race."""

    async def load():
        async with watched() as server:
            await ask(server)
            sample(server)
            await asyncio.to_thread(browser.get, f"http://127.0.0.1:{server.metrics_port}/")
            wait = WebDriverWait(browser, 90)
            await asyncio.to_thread(wait.until, lambda driver: rows(driver, "hot"))

    asyncio.run(load())
    return browser


class TestInChromium:
    """One page, looked at from all sides; each look runs in a thread while the service goes on."""

    async def look(self, browser, server, look):
        def run():
            browser.get(f"http://127.0.0.1:{server.metrics_port}/")
            wait = WebDriverWait(browser, 90)
            wait.until(lambda driver: text(driver, "state") != "waiting for data")
            return look(browser, wait)

        return await asyncio.to_thread(run)

    async def test_what_the_service_does_is_on_the_page(self, browser):
        async with watched() as server:
            await ask(server)
            sample(server)

            def look(driver, wait):
                assert text(driver, "state") == "serving"
                wait.until(lambda driver: len(rows(driver, "ranks")) == 2)
                assert rows(driver, "ranks")[0][0] == "0"
                assert "0–3" in rows(driver, "ranks")[0][3]
                assert rows(driver, "hot")[0] == ["7", "1", "210", "200 %"]
                assert len(rows(driver, "hot")) == 8
                assert "p50" in label(driver, "latency")
                assert "layer 1, expert 7 on rank 1: 200 % of the mean" in label(driver, "heat")
                paths = driver.find_elements("css selector", "#latency path")
                assert len(paths) == 3
                assert all(path.get_attribute("d").startswith("M") for path in paths)
                return driver.get_log("browser")

            assert await self.look(browser, server, look) == []  # no error, nothing that the policy refused

    async def test_the_heat_map_is_read_by_keyboard_and_knows_where_experts_moved(self, browser):
        engine = WatchedEngine()
        engine.slots = {2: (7, 6, 5, 4, 3, 2, 1, 0)}
        async with watched(engine) as server:
            await ask(server, layer=2)
            await ask(server)
            sample(server)

            def look(driver, wait):
                heat = driver.find_element("id", "heat")
                wait.until(lambda _: heat.is_displayed())
                heat.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
                assert text(driver, "heat-cell") == "layer 1, expert 2 on rank 0: 57 % of the mean"
                heat.send_keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT)
                assert text(driver, "heat-cell") == "layer 2, expert 6 on rank 0: 171 % of the mean"
                heat.send_keys(*[Keys.ARROW_UP] * 9)  # the edge holds
                assert text(driver, "heat-cell").startswith("layer 1")

            await self.look(browser, server, look)

    async def test_it_follows_changes_and_says_when_the_service_is_gone(self, browser):
        engine = WatchedEngine()
        async with watched(engine) as server:
            sample(server)

            def recovering(driver, wait):
                engine._state = "recovering"
                wait.until(lambda driver: text(driver, "state") == "recovering")
                wait.until(lambda driver: "no answer" in rows(driver, "ranks")[1][1])
                assert driver.title == "recovering · epserve"

            await self.look(browser, server, recovering)

        def gone():
            WebDriverWait(browser, 90).until(lambda driver: driver.find_element("id", "stale").is_displayed())
            assert "does not answer" in text(browser, "stale")

        await asyncio.to_thread(gone)
        browser.get_log("browser")  # the refused connections, which are meant

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    async def test_text_is_readable_in_both_schemes(self, browser, scheme):
        """WCAG AA: a contrast of 4.5 for all text."""
        async with watched() as server:
            await ask(server)
            sample(server)

            def look(driver, wait):
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
                wait.until(lambda driver: rows(driver, "hot"))
                worst = driver.execute_script(CONTRAST)
                driver.find_element("id", "theme").click()
                return worst, driver.execute_script(CONTRAST)

            for ratio, what in await self.look(browser, server, look):
                assert ratio >= 4.5, what

    async def test_it_fits_a_telephone(self, browser):
        async with watched() as server:
            await ask(server)
            sample(server)

            def look(driver, wait):
                wait.until(lambda driver: rows(driver, "hot"))
                size = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                try:
                    return driver.execute_script("return document.documentElement.scrollWidth")
                finally:
                    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

            assert await self.look(browser, server, look) <= 360

    @pytest.mark.parametrize("width", [360, 768, 1240])
    @pytest.mark.parametrize("age_s", [3, 25, 90, 400, 4000])
    def test_a_plot_is_filled_and_its_labels_do_not_overlap(self, page, width, age_s):
        driver = page
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            share, overlaps = driver.execute_script(PLOT, age_s)
        finally:
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert overlaps == []
        assert share > (0.9 if age_s >= 20 else 0.1), "a young service fills its plot, not the last pixels of it"

    @pytest.mark.parametrize(
        ("percent", "like"),
        [([95, 99, 103, 107], "even"), ([1, 5], "cold"), ([400, 390], "hot"), ([0, 0], "even")],
    )
    def test_the_heat_map_is_neutral_at_balance(self, page, percent, like):
        driver = page
        for found in driver.execute_script(HEAT, percent):
            assert min(found, key=lambda name: found[name]) == like, found
            assert found[like] < 40, found

    async def test_names_from_the_model_are_text_and_never_markup(self, browser):
        async with watched(WatchedEngine(name="<img src=x onerror=alert(1)>")) as server:
            sample(server)

            def look(driver, wait):
                wait.until(lambda driver: "<img" in text(driver, "model"))
                assert not driver.find_elements("css selector", "img")

            await self.look(browser, server, look)


def text(driver, element):
    return driver.find_element("id", element).text


def label(driver, element):
    return driver.find_element("id", element).get_attribute("aria-label")


def rows(driver, body):
    cells = "[...row.cells].map(cell => cell.innerText.trim())"
    return driver.execute_script(f"return [...document.getElementById(arguments[0]).rows].map(row => {cells})", body)


PLOT = """
const made = structuredClone(data), at = Array.from({length: arguments[0] + 1}, (_, i) => 1000 + i);
made.series = {at};
for (const name of ["p50_ms", "p90_ms", "p99_ms", "tokens", "queue_tokens", "requests", "steps", "errors"])
  made.series[name] = at.map((_, i) => 1e6 + i);
data = made; byId("span").value = "600"; render();
const overlaps = [];
for (const svg of document.querySelectorAll(".pair section > svg")) {
  const boxes = [...svg.querySelectorAll("text.time")].map(each => [each.textContent, each.getBoundingClientRect()]);
  if (boxes.length < 2) overlaps.push("fewer than two labels");
  for (const [a, p] of boxes) for (const [b, q] of boxes)
    if (a < b && p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom) overlaps.push([svg.id, a, b]);
}
const box = byId("rate").querySelector("path").getBoundingClientRect();
return [box.width / (byId("rate").getBoundingClientRect().width - 52), overlaps];
"""
HEAT = """
const made = structuredClone(data), percent = arguments[0];
made.heat = {rows: ["layer 0"], percent: [percent], experts: [percent.map((_, i) => i)]};
data = made; render();
const style = getComputedStyle(document.documentElement);
const pixels = byId("heat").getContext("2d").getImageData(0, 0, percent.length, 1).data;
return percent.map((_, i) => Object.fromEntries(["cold", "even", "hot"].map(name => {
  const wanted = style.getPropertyValue("--" + name).split(",").map(Number);
  return [name, Math.hypot(...wanted.map((v, c) => v - pixels[4 * i + c]))];
})));
"""
CONTRAST = """
function channels(colour) { return (colour.match(/[\\d.]+/g) || []).map(Number); }
function light(c) {
  const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
let worst = [99, ""];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!own || element.closest("svg, script, style, option") || !element.offsetParent) continue;
  let ground = element;
  while (ground && (channels(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
  const behind = ground ? channels(getComputedStyle(ground).backgroundColor) : [255, 255, 255];
  const [a, b] = [light(channels(getComputedStyle(element).color).slice(0, 3)), light(behind.slice(0, 3))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 120)];
}
return worst;
"""
