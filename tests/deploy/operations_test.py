#!/usr/bin/env python3
"""Runs every command of docs/operations.md, in their order.

usage: operations_test.py ROOT BIN_DIR

In namespaces of this process: its own network, so that the ports of the page are free, and its own mounts, so that the demo model
stands where the page names a checkpoint.  Only this differs from what the page says: --device cuda is left out (no GPU), and
kubectl and podman are the stand-ins below, which check what they are given against the manifests.  Needs root.
"""
import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

import yaml

from network import unshared

ROOT, BIN_DIR = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
TOOLS = pathlib.Path(sys.executable).parent
PAGE = ROOT / "docs/operations.md"
WAIT_S = 120
# Programs that go on until they are ended, and what their output says when they can be used.
SERVERS = {"ferry serve": "serving DeepSeek-V2-Lite-Chat at ", "ferry-router": "serving role=router", "ferry-prefill": "serving role=prefill",
           "ferry-decode": "serving role=decode", "prometheus": "Server is ready"}


def commands(text):
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from filter(None, block.splitlines())


@functools.cache
def rendered():
    out = []
    for overlay in ("cpu-demo", "gpu", "tls"):
        done = subprocess.run([TOOLS / "kubectl", "kustomize", ROOT / "deploy/kubernetes/overlays" / overlay], capture_output=True, text=True, check=True)
        out += [resource for resource in yaml.safe_load_all(done.stdout) if resource]
    return out


def kubectl(arguments):
    """What the cluster would find at fault: files and resources that are not there."""
    resources = rendered()
    arguments = list(arguments)
    if arguments[0] == "-n":
        assert arguments[1] in {r["metadata"]["name"] for r in resources if r["kind"] == "Namespace"}, arguments[1]
        arguments = arguments[2:]
    if arguments[:2] == ["apply", "-k"]:
        subprocess.run([TOOLS / "kubectl", "kustomize", ROOT / arguments[2]], stdout=subprocess.DEVNULL, check=True)
        return
    if arguments[0] == "label":
        assert arguments[1:3] == ["namespace", "default"], arguments
        key, value = arguments[3].split("=")
        wanted = [rule["from"][0]["namespaceSelector"]["matchLabels"] for r in resources if r["kind"] == "NetworkPolicy"
                  for rule in r["spec"].get("ingress", []) if "namespaceSelector" in rule["from"][0]]
        assert {key: value} in wanted, f"no policy asks for {key}={value}"
        return
    [named] = [a for a in arguments if re.match(r"(statefulset|deployment)/", a)]
    kind, name = named.split("/")
    found = [r for r in resources if r["kind"].lower() == kind and r["metadata"]["name"] == name]
    assert found, f"no {named}"
    verb = [a for a in arguments if a != named]
    if verb[:2] == ["set", "image"]:
        container, image = verb[2].split("=")
        assert container in [c["name"] for c in found[0]["spec"]["template"]["spec"]["containers"]], container
        assert image in {c["image"] for r in found for c in r["spec"]["template"]["spec"]["containers"]}, image
    elif verb[0] == "scale":
        assert re.fullmatch(r"--replicas=\d+", verb[1]) and len(verb) == 2, verb
    else:
        assert verb in (["rollout", "status"], ["logs"]), verb


def podman(arguments):
    build, flag, file, tag_flag, tag, context = arguments
    assert (build, flag, tag_flag) == ("build", "-f", "-t") and (ROOT / file).exists() and (ROOT / context).is_dir(), arguments
    assert tag in {c["image"] for r in rendered() if r["kind"] in ("Deployment", "StatefulSet") for c in r["spec"]["template"]["spec"]["containers"]}, tag


STAND_INS = {"kubectl": kubectl, "podman": podman}


def program_of(words):
    words = [word for word in words if not re.match(r"\w+=", word)]
    return " ".join(words[:2]) if words[0] == "ferry" else words[0]


def start(command, program, log, environment):
    with open(log, "w") as out:
        process = subprocess.Popen(["bash", "-c", f"exec env {command}"], stdout=out, stderr=out, env=environment, cwd=ROOT)
    until = time.monotonic() + WAIT_S
    while SERVERS[program] not in log.read_text():
        assert process.poll() is None and time.monotonic() < until, f"{command}\n{log.read_text()}"
        time.sleep(0.05)
    return process


def check(directory):
    environment = {**os.environ, "PATH": f"{BIN_DIR}:{os.environ['PATH']}"}
    run, servers = [], []
    try:
        for command in commands(PAGE.read_text()):
            words = shlex.split(command)
            program = program_of(words)
            run.append(program)
            print(f"$ {command}", flush=True)
            if program == "export":
                assert words[1] == "PATH=$PWD/build/release/bin:$PATH", command
            elif program in STAND_INS:
                STAND_INS[program](words[1:])
            else:
                command = command.replace("--device cuda ", "")
                if program in SERVERS:
                    servers.append(start(command, program, directory / f"{len(run)}.log", environment))
                    continue
                done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=WAIT_S)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                print(done.stdout[-300:])
    finally:
        for server in servers:
            server.terminate()
    for server in servers:
        assert server.wait(WAIT_S) == 0, server.args
    # A page without commands proves nothing.
    assert len(run) > 25 and set(SERVERS) <= set(run) and set(STAND_INS) <= set(run), sorted(set(run))


def check_sizes():
    """The table of sizes, where a configuration is at hand."""
    said = subprocess.run([BIN_DIR / "ferry", "inspect", "--model", ROOT / "bench/models/deepseek-v2-lite"], capture_output=True, text=True).stdout
    bfloat16, fp8 = (re.search(rf"^KV cache +{kind} +(\d+) bytes a token", said, re.MULTILINE)[1] for kind in ("bfloat16", "fp8"))
    page = PAGE.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| DeepSeek-V2-Lite |"))
    assert f"| {bfloat16} bytes | {fp8} bytes |" in row, (row, bfloat16, fp8)
    tokens = re.findall(r"\| (\d+) bytes \| \d+ bytes \| (\d+) \|$", page, re.MULTILINE)
    assert len(tokens) == 6 and all(int(40e9) // int(size) == int(fit) for size, fit in tokens), tokens


def check_flags():
    """Every flag that the page names in passing is one of some program."""
    programs = (["ferry-router"], ["ferry-prefill"], ["ferry-decode"], ["ferry", "serve"], ["ferry", "health"], ["ferry", "generate"], ["ferry", "bench"])
    helps = "".join(subprocess.run([BIN_DIR / name, *command, "--help"], capture_output=True, text=True, check=True).stdout for name, *command in programs)
    prose = re.sub(r"^```sh\n.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    for flag in set(re.findall(r"`?(--[a-z_0-9]+)", prose)) - {"--help"}:
        assert re.search(rf"(?<![\w-]){flag}(?![\w])", helps), f"no program has {flag}"


def check_readme():
    """The commands of README.md name hosts and files that are not here: their flags are checked."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"^    (?:build/release/bin/)?(ferry(?:-\w+| \w+)) (.*)$", text, re.MULTILINE)
    assert len(found) > 10, found
    for program, arguments in found:
        known = subprocess.run([BIN_DIR / program.split()[0], *program.split()[1:], "--help"], capture_output=True, text=True, check=True).stdout
        for flag in re.findall(r"(?<![\w-])--[a-z_0-9]+", arguments.split("#")[0]):
            assert re.search(rf"(?<![\w-]){flag}(?!\w)", known), f"README.md: {program} has no {flag}"


def main():
    with tempfile.TemporaryDirectory() as directory:
        model = "/srv/models/DeepSeek-V2-Lite-Chat"
        for command in (["ip", "link", "set", "lo", "up"], ["mount", "-t", "tmpfs", "tmpfs", "/srv"], ["mkdir", "-p", model],
                        ["mount", "--bind", ROOT / "models/demo", model]):
            subprocess.run(command, check=True)
        check_sizes()
        check_flags()
        check_readme()
        check(pathlib.Path(directory))


if __name__ == "__main__":
    unshared()
    main()
