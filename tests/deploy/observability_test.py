#!/usr/bin/env python3
"""Every query of the dashboards and every rule, asked of a real Prometheus that scrapes a live system under load; and every
metric that the system exports against docs/metrics.md.

usage: observability_test.py ROOT BIN_DIR
"""
import json
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

import yaml

ROOT, BIN_DIR = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
OBSERVABILITY = ROOT / "deploy/observability"
MODEL = ROOT / "models/demo"
WAIT_S = 120
MAX_SERIES = 600  # of one process: histograms and fixed words, whatever is asked of it
INTERVAL = "15s"  # stands for Grafana's $__rate_interval; scraped is every second


def wait_for(what, condition):
    until = time.monotonic() + WAIT_S
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > until:
            raise AssertionError(f"not within {WAIT_S} s: {what}")
        time.sleep(0.1)


def get(url):
    return urllib.request.urlopen(url, timeout=30).read().decode()


class System:
    """A router, a prefill and two decode workers."""

    def __init__(self, directory):
        self.directory, self.processes, self.ports = directory, {}, {}
        for name, role in (("prefill", "prefill"), ("decode-1", "decode"), ("decode-2", "decode")):
            self.start(name, f"ferry-{role}", "--model", MODEL, "--listen", "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0", "--num_threads", "1",
                       "--cache_bytes", "33554432", "--data_ip", "127.0.0.1")
        workers = ",".join(self.address(name) for name in ("prefill", "decode-1", "decode-2"))
        # Spans go where nobody listens: their drops are counted.
        self.start("router", "ferry-router", "--model_assets", MODEL, "--workers", workers, "--listen", "127.0.0.1:0", "--metrics_listen",
                   "127.0.0.1:0", "--local_prefill_tokens", "64", "--otlp_endpoint", "http://127.0.0.1:1")

    def start(self, name, program, *flags):
        port_file = self.directory / f"{name}.ports"
        with open(self.directory / f"{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen([BIN_DIR / program, *flags, "--port_file", port_file], stdout=log, stderr=log)
        wait_for(f"{name} serves", port_file.exists)
        self.ports[name] = dict(re.findall(r"(\w+)=(\d+)", port_file.read_text()))

    def address(self, name):
        return f"127.0.0.1:{self.ports[name]['grpc_port']}"

    def metrics_address(self, name):
        return f"127.0.0.1:{self.ports[name]['metrics_port']}"

    def stop(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(WAIT_S)


class Load:
    """Requests of all kinds until stop: short and long prompts, clients that leave, requests that cannot be served."""

    def __init__(self, address):
        self.address, self.stopping, self.rounds = address, threading.Event(), [0, 0, 0]
        self.threads = [threading.Thread(target=self.repeat, args=(i, what)) for i, what in enumerate((self.long, self.short, self.bad))]
        for thread in self.threads:
            thread.start()

    def repeat(self, number, what):
        while not self.stopping.is_set():
            what()
            self.rounds[number] += 1

    def ferry(self, *arguments, timeout=None):
        process = subprocess.Popen([BIN_DIR / "ferry", *arguments, "--address", self.address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def long(self):
        self.ferry("bench", "--requests", "6", "--concurrency", "3", "--input_tokens", "300", "--output_tokens", "12")

    def short(self):
        self.ferry("bench", "--requests", "6", "--concurrency", "3", "--input_tokens", "20", "--output_tokens", "12")

    def bad(self):
        self.ferry("generate", "--prompt", "x", "--max_tokens", "100000")
        self.ferry("generate", "--prompt", "the ferry " * 20, "--max_tokens", "700", "--ignore_eos", timeout=0.5)  # leaves

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


class Prometheus:
    def __init__(self, directory, system):
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OBSERVABILITY / name) for name in config["rule_files"]]
        roles = {"ferry-router": ["router"], "ferry-prefill": ["prefill"], "ferry-decode": ["decode-1", "decode-2"]}
        for scrape in config["scrape_configs"][0]["static_configs"]:
            scrape["targets"] = [system.metrics_address(name) for name in roles.pop(scrape["labels"]["app_kubernetes_io_name"])]
        assert not roles, roles
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = directory / "prometheus.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(["prometheus", f"--config.file={directory / 'prometheus.yaml'}", f"--storage.tsdb.path={directory / 'tsdb'}",
                                             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        wait_for("Prometheus is ready", lambda: "Server is ready" in self.log.read_text())

    def query(self, expr):
        """The values, without NaN."""
        answer = json.loads(get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"))
        assert answer["status"] == "success", answer
        return [float(one["value"][1]) for one in answer["data"]["result"] if not math.isnan(float(one["value"][1]))]

    def rules(self):
        groups = json.loads(get(f"{self.url}/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def stop(self):
        self.process.terminate()
        self.process.wait(WAIT_S)


def dashboard_queries():
    for path in sorted((OBSERVABILITY / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", INTERVAL).replace("$namespace", ".*")
                assert "$" not in expr, expr
                yield f"{path.stem}: {panel['title']} {target['refId']}", expr


def autoscaling_queries():
    """What prometheus-adapter asks for the metrics by which the manifests scale."""
    rules = yaml.safe_load((OBSERVABILITY / "prometheus_adapter.yaml").read_text())["rules"]["custom"]
    by_name = {rule["name"]["as"]: rule for rule in rules}
    for scaler in yaml.safe_load_all((ROOT / "deploy/kubernetes/base/autoscaling.yaml").read_text()):
        for metric in scaler["spec"]["metrics"]:
            rule = by_name[metric["pods"]["metric"]["name"]]
            expr = rule["metricsQuery"]
            for template, value in (("<<.Series>>", rule["seriesQuery"].split("{")[0]), ("<<.LabelMatchers>>", 'namespace="ferry"'), ("<<.GroupBy>>", "instance")):
                expr = expr.replace(template, value)
            yield f"autoscaling: {rule['name']['as']}", expr


def documented():
    """{metric: (type, labels)} of docs/metrics.md"""
    found = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(row) == 6 and row[0].startswith("`ferry_"):
            found[row[0].strip("`")] = (row[2], set(re.findall(r"`(\w+)`", row[4])))
    return found


def check_exported(name, text, table):
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    series = re.findall(r"^([a-z0-9_]+)(?:\{([^}]*)\})? \S+$", text, re.MULTILINE)
    assert len(series) < MAX_SERIES, f"{name} exports {len(series)} series"
    exported = set()
    for metric, labels in series:
        base = metric if metric in types else re.sub(r"_(bucket|sum|count)$", "", metric)
        if not base.startswith("ferry_"):
            assert base.startswith("exposer_"), f"{name}: {metric}"
            continue
        assert base in table, f"{name}: {base} is not in docs/metrics.md: tools/metrics_table.py"
        kind, wanted = table[base]
        assert types[base] == kind, f"{name}: {base} is a {types[base]}"
        found = set(re.findall(r'(\w+)="', labels)) - ({"le"} if kind == "histogram" else set())
        assert found == wanted, f"{name}: {base} has the labels {found}"
        exported.add(base)
    return exported


def check(directory):
    generated = directory / "dashboards"
    subprocess.run([ROOT / "tools/make_dashboards.py", generated], check=True)
    for path in generated.iterdir():
        assert path.read_text() == (OBSERVABILITY / "dashboards" / path.name).read_text(), f"run tools/make_dashboards.py: {path.name}"
    table = documented()
    queries = [*dashboard_queries(), *autoscaling_queries()]
    names = set(re.findall(r"\bferry_[a-z0-9_]+", " ".join(expr for _, expr in queries) + (OBSERVABILITY / "ferry.rules.yaml").read_text()))
    unknown = {name for name in names if re.sub(r"_(bucket|sum|count)$", "", name) not in table and name not in table}
    assert not unknown, f"queries for what nobody exports: {sorted(unknown)}"

    system = System(directory)
    prometheus = Prometheus(directory, system)
    load = Load(system.address("router"))
    try:
        wait_for("all kinds of requests have ended", lambda: min(load.rounds) >= 2)
        system.processes["decode-1"].send_signal(signal.SIGKILL)  # tries are repeated, outputs go on elsewhere
        system.processes["decode-1"].wait()
        before = list(load.rounds)
        wait_for("more have ended", lambda: all(now > then for now, then in zip(load.rounds, before)))
        pending = dict(queries) | {rule["name"]: rule["name"] for rule in prometheus.rules() if rule["type"] == "recording"}
        assert len(pending) > 80, len(pending)

        def all_answered():
            for what in list(pending):
                if prometheus.query(pending[what]):
                    del pending[what]
            return not pending

        try:
            wait_for("data for every query", all_answered)
        except AssertionError:
            raise AssertionError(f"no data: {pending}")
        for rule in prometheus.rules():
            assert rule["health"] == "ok", rule
        exported = set()
        for name in ("router", "prefill", "decode-2"):
            exported |= check_exported(name, get(f"http://{system.metrics_address(name)}/metrics"), table)
        # Only what never happened here may be missing.
        print(f"{len(queries)} queries answered, {len(exported)} metrics seen, not seen: {sorted(set(table) - exported)}")
        assert set(table) - exported <= {"ferry_state_slots", "ferry_state_snapshots_total", "ferry_transfer_failures_total", "ferry_late_events_total",
                                         "ferry_router_retries_total", "ferry_router_breaker_opened_total", "ferry_router_http_connections", "ferry_router_http_responses_total"}, "metrics that are documented and never there"
    finally:
        load.stop()
        prometheus.stop()
        system.stop()


def main():
    with tempfile.TemporaryDirectory() as directory:
        try:
            check(pathlib.Path(directory))
        except BaseException:
            for log in sorted(pathlib.Path(directory).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
            raise


if __name__ == "__main__":
    main()
