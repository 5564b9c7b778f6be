#!/usr/bin/env python3
"""Runs the pods of the overlay cpu-demo as a cluster would: their commands, arguments and environment, as the user they name,
without capabilities, on a read-only file system, each in a network namespace of its own, the services' names from a DNS server.

usage: pods_test.py ROOT BIN_DIR

Their probes must come to be true, a request must be answered through them, and each must end within its time at SIGTERM.
Needs root.
"""
import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.request

import yaml

from network import WAIT_S, NameServer, main, run, wait_for

ROOT, BIN_DIR = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
KUBECTL = pathlib.Path(sys.executable).parent / "kubectl"
DOMAIN = "ferry.svc.cluster.local"
GENERATE = ["--prompt", "It was a truth universally acknowledged that the ferry left at six. " * 20, "--max_tokens", "20", "--temperature", "0", "--quiet"]


class Pod:
    def __init__(self, network, resources, workload, ip):
        spec = workload["spec"]["template"]["spec"]
        [self.container] = spec["containers"]
        self.network, self.ip, self.name = network, ip, workload["metadata"]["name"]
        self.grace_s = spec["terminationGracePeriodSeconds"]
        network.add_host(self.name, ip, f"search {DOMAIN}\noptions ndots:5")
        variables = {"PATH": "/opt/ferry/bin:/usr/bin:/bin", **self.environment(resources)}
        arguments = [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], argument) for argument in self.container["args"]]
        # What the image has at its place, and then nothing can be written but what is mounted for it.
        mounts = ["mount -t tmpfs tmpfs /opt", "mkdir -p /opt/ferry/models/demo /opt/ferry/bin", f"mount --bind {ROOT}/models/demo /opt/ferry/models/demo",
                  f"mount --bind {BIN_DIR} /opt/ferry/bin", "mount -o remount,bind,ro /opt"]
        mounts += [f"mount -t tmpfs tmpfs {mount['mountPath']}" for mount in self.container["volumeMounts"]] if "volumeMounts" in self.container else []
        mounts += ["mount -o remount,bind,ro /"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] and self.container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        rights = ["setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}", "--clear-groups", "--no-new-privs",
                  "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
        script = " && ".join(mounts) + " && exec \"$@\""
        self.process = network.start(self.name, f"{self.name}.log", "unshare", "--mount", "--ipc", "sh", "-c", script, "pod", "env", "-i",
                                     *[f"{key}={value}" for key, value in variables.items()], *rights, *self.container["command"], *arguments)

    def environment(self, resources):
        [config] = [r for r in resources if r["kind"] == "ConfigMap"]
        fields = {"status.podIP": self.ip, "metadata.name": f"{self.name}-0"}
        given = {v["name"]: v["value"] if "value" in v else fields[v["valueFrom"]["fieldRef"]["fieldPath"]] for v in self.container.get("env", [])}
        return {**config["data"], **given}

    def probe(self, kind):
        probe = self.container[kind]["grpc"]
        asked = subprocess.run([BIN_DIR / "ferry", "health", "--address", f"{self.ip}:{probe['port']}", "--service", probe["service"]], capture_output=True)
        return asked.returncode == 0

    def end(self):
        """As the kubelet does it; preStop only sleeps."""
        started = time.monotonic()
        self.process.terminate()
        assert self.process.wait(self.grace_s) == 0, self.network.log(f"{self.name}.log")
        print(f"{self.name} ended after {time.monotonic() - started:.1f} s")


def check(network):
    rendered = subprocess.run([KUBECTL, "kustomize", ROOT / "deploy/kubernetes/overlays/cpu-demo"], capture_output=True, text=True, check=True)
    resources = [resource for resource in yaml.safe_load_all(rendered.stdout) if resource]
    workloads = {r["metadata"]["name"]: r for r in resources if r["kind"] in ("Deployment", "StatefulSet")}
    expected = run(BIN_DIR / "ferry", "generate", "--model", ROOT / "models/demo", *GENERATE)
    names = NameServer(network, DOMAIN)
    names.start()
    ips = {"ferry-router": "10.77.0.2", "ferry-prefill": "10.77.0.11", "ferry-decode": "10.77.0.21"}
    pods = {name: Pod(network, resources, workload, ips[name]) for name, workload in workloads.items()}
    ready = {}
    for name in ("ferry-prefill", "ferry-decode"):
        wait_for(f"startup of {name}", lambda: pods[name].probe("startupProbe"))
        ready[name] = [ips[name]]  # the headless service's record
        names.set(**ready)
    wait_for("startup of the router", lambda: pods["ferry-router"].probe("startupProbe"))
    for pod in pods.values():
        wait_for(f"{pod.name} is ready", lambda: pod.probe("readinessProbe"))
        assert pod.probe("livenessProbe"), pod.name
        status = pathlib.Path(f"/proc/{pod.process.pid}/status").read_text()
        assert re.search(r"^CapEff:\s0+$", status, re.MULTILINE) and re.search(r"^Uid:\s10001\s10001\s10001\s10001$", status, re.MULTILINE), status
        assert re.search(r"^NoNewPrivs:\s1$", status, re.MULTILINE), status
    said = run(BIN_DIR / "ferry", "generate", "--address", f"{ips['ferry-router']}:8500", *GENERATE)
    assert said == expected, (said, expected)
    models = json.load(urllib.request.urlopen(f"http://{ips['ferry-router']}:8080/v1/models", timeout=WAIT_S))
    assert [model["id"] for model in models["data"]] == ["demo"], models
    line = [line for line in network.log("ferry-router.log").splitlines() if '"request_id"' in line][-1]
    assert f'"prefill_worker":"{ips["ferry-prefill"]}:8601"' in line.replace('": "', '":"'), line
    for pod in pods.values():
        pod.end()
    names.stop()


if __name__ == "__main__":
    main(check)
