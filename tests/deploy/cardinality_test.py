#!/usr/bin/env python3
"""However many models, tenants, paths and workers come and go, the number of series that the processes export stays.

usage: cardinality_test.py BIN_DIR MODEL_DIR

Real processes and a real dnsmasq in a network of their own.  Needs root.
"""
import http.client
import json
import pathlib
import re
import sys
import urllib.request

from network import NameServer, main, wait_for

BIN_DIR, MODEL = pathlib.Path(sys.argv[1]), sys.argv[2]
ROUTER, PREFILL, DECODE, COMER = "10.77.0.2", "10.77.0.11", "10.77.0.21", "10.77.0.31"
PROMPT = "It was a truth universally acknowledged that the ferry left at six in the morning, and that whoever came"
COMERS = 4  # processes at one address, one after the other
STRANGERS = [f"10.77.0.{100 + i}" for i in range(80)]  # addresses where nobody is
VISITORS = 300


def scrape(ip):
    """The names and labels of all series of a process."""
    text = urllib.request.urlopen(f"http://{ip}:9600/metrics", timeout=30).read().decode()
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def workers():
    return {m[1] for m in re.finditer(r'worker="([^":]+):', "\n".join(scrape(ROUTER)))}


class Client:
    """One connection to the router's HTTP."""

    def __init__(self):
        self.connection = http.client.HTTPConnection(ROUTER, 8080, timeout=60)

    def ask(self, status, path="/v1/completions", model="demo", tenant="gold", **fields):
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields})
        self.connection.request("POST", path, body, {"content-type": "application/json", "x-ferry-tenant": tenant})
        response = self.connection.getresponse()
        said = response.read()
        assert response.status == status, (response.status, said)


def start(network, name, ip, program, *flags):
    port_file = network.directory / f"{name}.ports"
    port_file.unlink(missing_ok=True)
    process = network.start(name, f"{name}.log", BIN_DIR / program, "--metrics_listen", "0.0.0.0:9600", "--port_file", port_file, *flags)
    wait_for(f"{name} serves", port_file.exists)
    return process


def start_worker(network, role, name, ip):
    return start(network, name, ip, f"ferry-{role}", "--model", MODEL, "--listen", "0.0.0.0:8602", "--data_ip", ip, "--num_threads", "1",
                 "--cache_bytes", "33554432", "--links", "tcp")


def end(process):
    process.terminate()
    assert process.wait(60) == 0


def check(network):
    names = NameServer(network, "ferry.test")
    names.start()
    for name, ip in (("router", ROUTER), ("prefill", PREFILL), ("decode", DECODE), ("comer", COMER)):
        network.add_host(name, ip)
    names.set(workers=[PREFILL, DECODE])
    lasting = {PREFILL: start_worker(network, "prefill", "prefill", PREFILL), DECODE: start_worker(network, "decode", "decode", DECODE)}
    lasting[ROUTER] = start(network, "router", ROUTER, "ferry-router", "--model_assets", MODEL, "--listen", "0.0.0.0:8500", "--http_listen",
                            "0.0.0.0:8080", "--workers", "dns:///workers.ferry.test:8602", "--dns_refresh_s", "0.2", "--local_prefill_tokens", "0",
                            "--trust_tenant_header", "--tenant_limit", "gold=100:100")
    wait_for("the router is ready", lambda: "process=ferry-router ready" in network.log("router.log"))

    def comer(number):
        """A decode worker comes, serves and goes."""
        process = start_worker(network, "decode", "comer", COMER)
        names.set(workers=[PREFILL, DECODE, COMER])
        wait_for("it is known", lambda: COMER in workers())
        # Another prompt each: a cached one would go where it is.
        wait_for("it serves", lambda: client.ask(200, prompt=f"{number} {PROMPT}") or 'ferry_requests_total{status="ok"}' in scrape(COMER))
        names.set(workers=[PREFILL, DECODE])
        wait_for("it has gone", lambda: COMER not in workers())
        end(process)

    # One of each kind.
    client = Client()
    client.ask(200)
    client.ask(200, tenant="stranger")
    client.ask(404, model="stranger")
    client.ask(404, path="/stranger")
    client.ask(400, temperature=-1)
    comer(0)
    before = {ip: scrape(ip) for ip in lasting}

    for i in range(VISITORS):
        client.ask(200, tenant=f"visitor-{i}", seed=i, user=f"visitor-{i}")
        client.ask(404, model=f"visitor-{i}")
        client.ask(404, path=f"/visitor-{i}")
    for number in range(1, COMERS):
        comer(number)
    for first in range(0, len(STRANGERS), 20):
        some = STRANGERS[first:first + 20]
        names.set(workers=[PREFILL, DECODE, *some])
        wait_for("the strangers are known", lambda: set(some) <= workers())
        names.set(workers=[PREFILL, DECODE])
        wait_for("the strangers have gone", lambda: workers() == {PREFILL, DECODE})

    for ip in lasting:
        # What has not occurred before may occur: of a fixed word, never of a name.
        new = scrape(ip) - before[ip]
        assert not re.search(r"visitor|10\.77\.0\.(?!11\b|21\b)", "\n".join(new)), sorted(new)
        assert len(new) <= 10, sorted(new)
        print(f"{ip}: {len(before[ip])} series, then {len(new)} more")
    for ip in (ROUTER, PREFILL, DECODE):
        end(lasting[ip])
    names.stop()


if __name__ == "__main__":
    main(check)
