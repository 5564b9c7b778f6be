#!/usr/bin/env python3
"""Workers behind DNS names are added, removed and renumbered under load, and nothing is lost.

usage: discovery_test.py BIN_DIR MODEL_DIR

Real processes, each worker in a network namespace of its own with its own address, joined by a bridge; a real dnsmasq.
Needs root.
"""
import pathlib
import re
import subprocess
import sys
import threading
import urllib.request

from network import WAIT_S, NameServer, main, run, wait_for

BIN_DIR, MODEL = pathlib.Path(sys.argv[1]), sys.argv[2]
ROUTER = "10.77.0.2"
PROMPT = "It was a truth universally acknowledged that the ferry left at six in the morning, and that whoever came"
GENERATE = ["--prompt", PROMPT, "--max_tokens", "40", "--temperature", "0", "--quiet"]


class Worker:
    def __init__(self, network, role, name, ip, *flags):
        self.name, self.ip = name, ip
        self.address = f"{ip}:{8601 if role == 'prefill' else 8602}"
        network.add_host(name, ip)
        port_file = network.directory / f"{name}.ports"
        self.process = network.start(
            name, f"{name}.log", BIN_DIR / f"ferry-{role}", "--model", MODEL, "--listen", f"0.0.0.0:{self.address.split(':')[1]}",
            "--metrics_listen", "0.0.0.0:9600", "--port_file", port_file, "--num_threads", "1", "--cache_bytes", "67108864",
            "--links", "tcp", "--data_ip", ip, *flags)
        wait_for(f"{name} serves", port_file.exists)

    def metrics(self):
        return urllib.request.urlopen(f"http://{self.ip}:9600/metrics", timeout=10).read().decode()

    def served(self):
        return sum(float(v) for v in re.findall(r'^ferry_requests_total\{status="ok"\} (\S+)', self.metrics(), re.MULTILINE))

    def end(self):
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0, self.name


def certificates(directory):
    """Flags of one certificate for every name here, of an authority that is made for it."""
    def openssl(*arguments):
        run("openssl", *arguments)
    ca, ca_key, key, request, certificate, names = (directory / name for name in ("ca.pem", "ca.key", "tls.key", "tls.csr", "tls.pem", "names"))
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-subj", "/CN=ferry-ca", "-days", "2")
    openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=ferry")
    names.write_text("subjectAltName=DNS:*.ferry.test,DNS:localhost")
    openssl("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", certificate, "-days", "2", "-extfile", names)
    return ["--tls_ca", ca, "--tls_cert", certificate, "--tls_key", key]


def check_tls(network, names, expected):
    """As the overlay tls has it: mTLS, SRV records, workers called by names that their certificates say, probes by ferry health."""
    tls = certificates(network.directory)
    workers = [Worker(network, "prefill", "p4", "10.77.0.14", "--advertise", "p4.ferry.test:8601", *tls),
               Worker(network, "decode", "d4", "10.77.0.24", "--advertise", "d4.ferry.test:8602", *tls)]
    names.set(prefill=["10.77.0.12"], decode=["10.77.0.23"], p4=["10.77.0.14"], d4=["10.77.0.24"], router=[ROUTER])  # the others go on
    router = network.start("router", "tls.log", *router_flags("dns:///_grpc._tcp.tls-prefill.ferry.test,dns:///_grpc._tcp.tls-decode.ferry.test", 8700), *tls)
    wait_for("both workers serve over TLS", lambda: states(9800) == {"p4.ferry.test:8601": "serving", "d4.ferry.test:8602": "serving"})
    said = run("ip", "netns", "exec", "router", BIN_DIR / "ferry", "generate", "--address", "router.ferry.test:8700", *GENERATE, *tls)
    assert said == expected, said
    assert workers[0].served() > 0, "the prompt has not been prefilled"
    run("ip", "netns", "exec", "d4", BIN_DIR / "ferry", "health", "--address", "localhost:8602", *tls)
    for process in [router] + [worker.process for worker in workers]:
        process.terminate()
        assert process.wait(WAIT_S) == 0


class Load:
    """Clients that ask the same all the time and know the answer."""

    def __init__(self, expected):
        self.expected, self.stopping = expected, threading.Event()
        self.answers, self.wrong = 0, []
        self.threads = [threading.Thread(target=self.ask) for _ in range(3)]
        for thread in self.threads:
            thread.start()

    def ask(self):
        while not self.stopping.is_set():
            done = subprocess.run(["ip", "netns", "exec", "router", BIN_DIR / "ferry", "generate", "--address", f"{ROUTER}:8500", *GENERATE],
                                  capture_output=True, text=True)
            if done.returncode == 0 and done.stdout == self.expected:
                self.answers += 1
            else:
                self.wrong.append((done.returncode, done.stdout, done.stderr))

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


def router_flags(workers, port):
    return [BIN_DIR / "ferry-router", "--model_assets", MODEL, "--workers", workers, "--listen", f"0.0.0.0:{port}", "--metrics_listen",
            f"0.0.0.0:{port + 1100}", "--dns_refresh_s", "0.2", "--local_prefill_tokens", "0"]


def states(port=9600):
    """{address: state} of the router's workers."""
    try:
        text = urllib.request.urlopen(f"http://{ROUTER}:{port}/metrics", timeout=10).read().decode()
    except OSError:
        return {}
    found = re.findall(r'^ferry_router_worker_state\{role="\w*",state="(\w+)",worker="([^"]+)"\} 1', text, re.MULTILINE)
    return {address: state for state, address in found}


def said_of_names(network):
    """What the router said last of each name: found, unknown."""
    return set(dict(re.findall(r"workers=(dns:\S+) (found|unknown)", network.log("router.log"))).values())


def check(network):
    expected = run(BIN_DIR / "ferry", "generate", "--model", MODEL, *GENERATE)
    names = NameServer(network, "ferry.test", [("_grpc._tcp.decode", "d2", 8602), ("_grpc._tcp.decode", "d3", 8602),
                                               ("_grpc._tcp.tls-prefill", "p4", 8601), ("_grpc._tcp.tls-decode", "d4", 8602)])
    names.start()
    network.add_host("router", ROUTER)
    p1 = Worker(network, "prefill", "p1", "10.77.0.11")
    d1 = Worker(network, "decode", "d1", "10.77.0.21")
    router = network.start("router", "router.log", *router_flags("dns:///prefill.ferry.test:8601,dns:///decode.ferry.test:8602", 8500))
    wait_for("the router says that its names lead nowhere", lambda: "unknown cause=" in network.log("router.log"))
    names.set(prefill=[p1.ip], decode=[d1.ip])
    wait_for("both workers serve", lambda: states() == {p1.address: "serving", d1.address: "serving"})
    load = Load(expected)
    try:
        wait_for("answers", lambda: load.answers >= 3)

        d2 = Worker(network, "decode", "d2", "10.77.0.22")
        names.set(prefill=[p1.ip], decode=[d1.ip, d2.ip])
        wait_for("the added worker answers", lambda: d2.served() > 0)

        names.set(prefill=[p1.ip], decode=[d2.ip])
        wait_for("the removed worker has gone", lambda: d1.address not in states())
        d1.end()
        print(f"added and removed: {load.answers} answers")

        # Renumbered: the same names, other addresses, and the old processes end at the same moment.
        p2 = Worker(network, "prefill", "p2", "10.77.0.12")
        d3 = Worker(network, "decode", "d3", "10.77.0.23")
        names.set(prefill=[p2.ip], decode=[d3.ip])
        p1.end()
        d2.end()
        wait_for("only the new ones are known", lambda: states() == {p2.address: "serving", d3.address: "serving"})
        before = d3.served()
        wait_for("they answer", lambda: d3.served() >= before + 3 and p2.served() > 0)
        print(f"renumbered: {load.answers} answers")

        # Without a name server all stays as it is.
        names.stop()
        wait_for("the router says so", lambda: said_of_names(network) == {"unknown"})
        before = d3.served()
        wait_for("requests go on", lambda: d3.served() >= before + 3)
        names.start()
        names.set(prefill=[p2.ip], decode=[d3.ip], d3=[d3.ip])
        wait_for("names are known again", lambda: said_of_names(network) == {"found"})
        print(f"without a name server: {load.answers} answers")

        # SRV records: names and ports of their own; the one whose name leads nowhere is in nobody's way.
        srv = network.start("router", "srv.log", *router_flags(f"{p2.address},dns:///_grpc._tcp.decode.ferry.test", 8600))
        wait_for("the worker of the SRV record serves", lambda: states(9700).get("d3.ferry.test:8602") == "serving")
        srv.terminate()
        assert srv.wait(WAIT_S) == 0
        check_tls(network, names, expected)
    finally:
        load.stop()
    assert not load.wrong, load.wrong[:3]
    print(f"{load.answers} answers, all right")
    router.terminate()
    assert router.wait(WAIT_S) == 0
    p2.end()
    d3.end()
    names.stop()


if __name__ == "__main__":
    main(check)
