"""A small network for tests: namespaces joined by a bridge, and a real DNS server.

Everything lives in namespaces of the process that has called unshared(), or main(): nothing is left, however it ends.  Needs root.
"""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HUB = "10.77.0.1"
WAIT_S = 240  # for anything to happen, on a busy machine


def unshared():
    """Starts this program anew in a network, mounts and processes of its own, which the kernel takes away when it ends."""
    if os.environ.get("FERRY_UNSHARED") != "1":
        os.environ["FERRY_UNSHARED"] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *sys.argv])


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def wait_for(what, condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"not within {WAIT_S} s: {what}")
        time.sleep(0.05)


class Network:
    """A bridge with one namespace a host."""

    def __init__(self, directory):
        self.directory = directory
        for shared in ("/run/netns", "/etc/netns"):  # not the machine's
            os.makedirs(shared, exist_ok=True)
            run("mount", "-t", "tmpfs", "tmpfs", shared)
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "hub", "type", "bridge")
        run("ip", "addr", "add", f"{HUB}/24", "dev", "hub")
        run("ip", "link", "set", "hub", "up")

    def add_host(self, name, ip, resolver_line=""):
        run("ip", "netns", "add", name)
        resolver = pathlib.Path("/etc/netns", name)
        resolver.mkdir()
        (resolver / "resolv.conf").write_text(f"nameserver {HUB}\noptions timeout:1 attempts:1\n{resolver_line}\n")
        run("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"v-{name}", "master", "hub", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        wait_for(f"{name}'s eth0 is up", lambda: "state UP" in run("ip", "-n", name, "link", "show", "eth0"))

    def start(self, host, log, *command):
        prefix = ["ip", "netns", "exec", host] if host else []
        with open(self.directory / log, "a") as out:
            return subprocess.Popen([*prefix, *command], stdout=out, stderr=out)

    def log(self, name):
        return (self.directory / name).read_text()


class NameServer:
    """dnsmasq for the names below `domain`, with these SRV records: (service, target, port), all in the domain."""

    def __init__(self, network, domain, services=()):
        self.network, self.domain = network, domain
        self.services = [f"--srv-host={service}.{domain},{target}.{domain},{port}" for service, target, port in services]
        self.hosts = network.directory / "hosts"
        self.hosts.write_text("")
        self.process = None

    def start(self):
        started = self.network.log("dnsmasq.log").count("started, version") if self.process else 0
        self.process = self.network.start(
            None, "dnsmasq.log", "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--no-resolv", "--no-hosts", "--no-daemon",
            f"--addn-hosts={self.hosts}", f"--listen-address={HUB}", "--bind-interfaces", f"--local=/{self.domain}/", *self.services)
        # Before, SIGHUP would end it.
        wait_for("dnsmasq serves", lambda: self.network.log("dnsmasq.log").count("started, version") > started)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def set(self, **records):
        """name=[ip, ...]"""
        lines = [f"{ip} {name}.{self.domain}" for name, ips in records.items() for ip in ips]
        self.hosts.write_text("\n".join(lines) + "\n")
        self.process.send_signal(signal.SIGHUP)


def main(check):
    """Runs check(network); if it fails every process's log is shown."""
    unshared()
    with tempfile.TemporaryDirectory() as directory:
        network = Network(pathlib.Path(directory))
        try:
            check(network)
        except BaseException:
            for log in sorted(network.directory.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-6000:]}")
            raise
