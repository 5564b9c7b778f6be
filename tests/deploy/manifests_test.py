#!/usr/bin/env python3
"""Renders deploy/kubernetes with kubectl and judges what comes out, without a cluster.

usage: manifests_test.py ROOT BIN_DIR

Every resource against the schemas of Kubernetes (strict: unknown fields are errors; custom resources against those below);
every flag of every container against the program's --help; what only holds between resources: selectors, ports, names that
are referred to, drain times, security.
"""
import pathlib
import re
import subprocess
import sys
import unittest

import jsonschema
import kubernetes_validate
import yaml

ROOT, BIN_DIR = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
KUBECTL = pathlib.Path(sys.executable).parent / "kubectl"
KUBERNETES = "1.34"
OVERLAYS = ["base", "overlays/cpu-demo", "overlays/gpu", "overlays/tls"]
WORKLOADS = {"Deployment", "StatefulSet"}
EXIT_MARGIN_S = 10  # between the end of a drain and the kill

LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def record(required, **properties):
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


STRING, STRINGS = {"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}
# The specs of custom resources, as far as they are used here.
CUSTOM = {
    ("monitoring.coreos.com/v1", "PodMonitor"): record(
        ["selector", "podMetricsEndpoints"], selector=record(["matchLabels"], matchLabels=LABELS), podTargetLabels=STRINGS,
        podMetricsEndpoints={"type": "array", "minItems": 1, "items": record(
            ["port"], port=STRING, path={"type": "string", "pattern": "^/"}, interval={"type": "string", "pattern": "^[0-9]+s$"})}),
    ("cert-manager.io/v1", "Certificate"): record(
        ["secretName", "issuerRef", "dnsNames"], secretName=STRING, commonName={"type": "string", "maxLength": 64},
        dnsNames=STRINGS,
        usages={"type": "array", "items": {"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}},
        privateKey=record(["algorithm"], algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]}, size={"type": "integer"}),
        issuerRef=record(["name"], kind={"enum": ["Issuer", "ClusterIssuer"]}, name=STRING)),
}


def render(overlay):
    done = subprocess.run([KUBECTL, "kustomize", ROOT / "deploy/kubernetes" / overlay], capture_output=True, text=True)
    if done.returncode != 0 or done.stderr:
        raise AssertionError(f"{overlay}: kubectl kustomize: {done.stderr}")
    return [resource for resource in yaml.safe_load_all(done.stdout) if resource]


RENDERED = {overlay: render(overlay) for overlay in OVERLAYS}


def name(resource):
    return f"{resource['kind']}/{resource['metadata']['name']}"


def of_kind(resources, *kinds):
    return [resource for resource in resources if resource["kind"] in kinds]


def pod(workload):
    return workload["spec"]["template"]["spec"]


def container(workload):
    [only] = pod(workload)["containers"]
    return only


def flags(command_line):
    """{"--flag": value or True}"""
    found = {}
    for argument in command_line:
        flag, equals, value = argument.partition("=")
        found[flag] = value if equals else True
    return found


def settings(resources):
    [config] = of_kind(resources, "ConfigMap")
    return config["data"]


def help_flags(command):
    program = [BIN_DIR / command[0], *command[1:], "--help"]
    text = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--[a-z_0-9]+", text))


def matches(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())


class Manifests(unittest.TestCase):
    where = ""

    def each(self, *kinds):
        for overlay, resources in RENDERED.items():
            for resource in of_kind(resources, *kinds) if kinds else resources:
                self.where = f"{overlay} {name(resource)}"
                yield overlay, resources, resource
        self.where = ""

    def _formatMessage(self, msg, standardMsg):  # of every assertion
        return " ".join(filter(None, [self.where, msg, standardMsg]))

    def test_every_resource_fits_its_schema(self):
        for _, _, resource in self.each():
            custom = CUSTOM.get((resource["apiVersion"], resource["kind"]))
            if custom is None:
                kubernetes_validate.validate(resource, KUBERNETES, strict=True)
            else:
                jsonschema.validate(resource["spec"], custom)

    def test_the_schemas_refuse_what_is_wrong(self):
        [deployment] = of_kind(render("base"), "Deployment")
        deployment["spec"]["replica"] = 2
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
        [monitor] = of_kind(render("base"), "PodMonitor")
        monitor["spec"]["podMetricsEndpoints"][0]["prot"] = "metrics"
        with self.assertRaises(jsonschema.ValidationError):
            jsonschema.validate(monitor["spec"], CUSTOM["monitoring.coreos.com/v1", "PodMonitor"])

    def test_everything_is_there(self):
        for overlay, resources in RENDERED.items():
            kinds = {resource["kind"] for resource in resources}
            wanted = {"Namespace", "ServiceAccount", "ConfigMap", "Service", "Deployment", "StatefulSet", "PodDisruptionBudget",
                      "HorizontalPodAutoscaler", "NetworkPolicy", "PodMonitor"}
            self.assertEqual(wanted - kinds, set(), overlay)
            for resource in resources:
                if resource["kind"] != "Namespace":
                    self.assertEqual(resource["metadata"]["namespace"], "ferry", f"{overlay} {name(resource)}")

    def test_every_flag_exists_and_every_variable_is_set(self):
        for _, resources, workload in self.each(*WORKLOADS):
            main = container(workload)
            known = help_flags(main["command"])
            self.assertIn("--listen", known)
            self.assertLessEqual(set(flags(main["args"])), known)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "exec" in main[probe]:
                    command = main[probe]["exec"]["command"]
                    self.assertLessEqual(set(flags(command[2:])), help_flags(command[:2]))
            variables = set(settings(resources)) | {variable["name"] for variable in main.get("env", [])}
            self.assertLessEqual(set(re.findall(r"\$\((\w+)\)", " ".join(main["args"]))), variables)
            [source] = main["envFrom"]
            self.assertIn(source["configMapRef"]["name"], [c["metadata"]["name"] for c in of_kind(resources, "ConfigMap")])

    def test_ports_are_those_of_the_flags(self):
        for _, _, workload in self.each(*WORKLOADS):
            main = container(workload)
            given = flags(main["args"])
            ports = {port["name"]: port["containerPort"] for port in main["ports"]}
            self.assertEqual(given["--listen"], f"0.0.0.0:{ports['grpc']}")
            self.assertEqual(given["--metrics_listen"], f"0.0.0.0:{ports['metrics']}")
            if workload["kind"] == "Deployment":
                self.assertEqual(given["--http_listen"], f"0.0.0.0:{ports['http']}")
            if workload["kind"] == "StatefulSet":
                self.assertEqual(int(given["--data_port"]), ports["data"])
                self.assertTrue(given["--advertise"].endswith(f":{ports['grpc']}"))
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "grpc" in main[probe]:
                    self.assertEqual(main[probe]["grpc"]["port"], ports["grpc"])
                else:
                    self.assertEqual(flags(main[probe]["exec"]["command"])["--address"], f"localhost:{ports['grpc']}")

    def test_the_router_finds_every_worker(self):
        for overlay, resources, router in self.each("Deployment"):
            services = {service["metadata"]["name"]: service for service in of_kind(resources, "Service")}
            found = set()
            for worker in flags(container(router)["args"])["--workers"].split(","):
                srv = re.fullmatch(r"dns:///_(\w+)\._tcp\.([\w-]+)", worker)
                hosts = re.fullmatch(r"dns:///([\w-]+):(\d+)", worker)
                service = services[srv[2] if srv else hosts[1]]
                [port] = service["spec"]["ports"]
                self.assertEqual(service["spec"]["clusterIP"], "None")
                if srv:
                    self.assertEqual(port["name"], srv[1])
                else:
                    self.assertEqual(port["port"], int(hosts[2]))
                self.assertNotIn("publishNotReadyAddresses", service["spec"])
                found.add(service["metadata"]["name"])
            for worker in of_kind(resources, "StatefulSet"):
                self.assertIn(worker["spec"]["serviceName"], found)
            self.assertEqual("tls" in overlay, srv is not None)

    def test_selectors_select(self):
        for _, resources, resource in self.each("Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy", *WORKLOADS):
            spec = resource["spec"]
            if resource["kind"] == "NetworkPolicy":
                selector = spec["podSelector"].get("matchLabels", {})
            else:
                selector = spec["selector"].get("matchLabels", spec["selector"])
            chosen = [w for w in of_kind(resources, *WORKLOADS) if matches(selector, w["spec"]["template"]["metadata"]["labels"])]
            self.assertTrue(chosen)
            if resource["kind"] in {"Service", "PodDisruptionBudget"}:
                self.assertEqual(len(chosen), 1)
            if resource["kind"] == "PodMonitor":
                self.assertEqual(len(chosen), 3)
                for endpoint in spec["podMetricsEndpoints"]:
                    for workload in chosen:
                        self.assertIn(endpoint["port"], [port["name"] for port in container(workload)["ports"]])
        for _, resources, scaler in self.each("HorizontalPodAutoscaler"):
            target = scaler["spec"]["scaleTargetRef"]
            [scaled] = [r for r in resources if name(r) == f"{target['kind']}/{target['name']}"]
            self.assertNotIn("replicas", scaled["spec"])

    def test_a_drain_ends_before_the_kill(self):
        for _, _, workload in self.each(*WORKLOADS):
            main = container(workload)
            command = main["lifecycle"]["preStop"]["exec"]["command"]
            self.assertEqual(command[0], "sleep")
            needed = float(command[1]) + float(flags(main["args"])["--drain_limit_s"]) + EXIT_MARGIN_S
            self.assertGreaterEqual(pod(workload)["terminationGracePeriodSeconds"], needed)

    def test_pods_may_do_little(self):
        for _, resources, workload in self.each(*WORKLOADS):
            self.assertFalse(pod(workload)["automountServiceAccountToken"])
            self.assertTrue(pod(workload)["securityContext"]["runAsNonRoot"])
            self.assertEqual(pod(workload)["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
            security = container(workload)["securityContext"]
            self.assertTrue(security["readOnlyRootFilesystem"])
            self.assertFalse(security["allowPrivilegeEscalation"])
            self.assertEqual(security["capabilities"]["drop"], ["ALL"])
            self.assertNotIn("add", security["capabilities"])
            [namespace] = of_kind(resources, "Namespace")
            self.assertEqual(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "restricted")

    def test_volumes_are_mounted_and_mounts_have_volumes(self):
        for _, _, workload in self.each(*WORKLOADS):
            mounted = {mount["name"] for mount in container(workload).get("volumeMounts", [])}
            self.assertEqual(mounted, {volume["name"] for volume in pod(workload).get("volumes", [])})

    def test_gpus(self):
        for worker in of_kind(RENDERED["overlays/gpu"], "StatefulSet"):
            main = container(worker)
            self.assertEqual(main["image"], "registry.example/ferry-cuda:0.1.0")
            self.assertEqual(main["resources"]["limits"]["nvidia.com/gpu"], 1)
            self.assertIn("rdma/hca_shared_devices", main["resources"]["limits"])
            [shm] = [v for v in pod(worker)["volumes"] if v["name"] == "shm"]
            self.assertEqual(shm["emptyDir"], {"medium": "Memory", "sizeLimit": "8Gi"})
        self.assertEqual(settings(RENDERED["overlays/gpu"])["DEVICE"], "cuda")

    def test_tls_is_everywhere_and_names_fit(self):
        resources = RENDERED["overlays/tls"]
        certificates = {c["spec"]["secretName"]: c["spec"] for c in of_kind(resources, "Certificate")}
        for workload in of_kind(resources, *WORKLOADS):
            given = flags(container(workload)["args"])
            self.assertLessEqual({"--tls_cert", "--tls_key", "--tls_ca"}, set(given))
            [secret] = [v["secret"]["secretName"] for v in pod(workload)["volumes"] if v["name"] == "tls"]
            names = certificates[secret]["dnsNames"]
            self.assertIn("localhost", names)  # probes
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                self.assertNotIn("grpc", container(workload)[probe])
            if workload["kind"] == "StatefulSet":
                domain = f"{workload['spec']['serviceName']}.ferry.svc.cluster.local"
                self.assertIn(f"*.{domain}", names)
                self.assertTrue(given["--advertise"].startswith(f"$(POD_NAME).{domain}:"))

    def test_only_workers_reach_the_data_link(self):
        for overlay, resources in RENDERED.items():
            policies = of_kind(resources, "NetworkPolicy")
            everyone = [p for p in policies if p["spec"]["podSelector"] == {} and "ingress" not in p["spec"]]
            self.assertIn(["Ingress", "Egress"], [p["spec"]["policyTypes"] for p in everyone], overlay)
            for worker in of_kind(resources, "StatefulSet"):
                low, high = map(int, {v["name"]: v.get("value") for v in container(worker)["env"]}["UCX_TCP_PORT_RANGE"].split("-"))
                [data] = [p["containerPort"] for p in container(worker)["ports"] if p["name"] == "data"]
                links = settings(resources)["LINKS"].split(",")
                last = data + len(links) - len({"shm"} & set(links)) - 1  # a port for each kind that listens
                reaching = []
                for policy in policies:
                    for rule in policy["spec"].get("ingress", []):
                        ports = rule.get("ports", [])
                        covers = lambda wanted: any(
                            isinstance(p["port"], int) and p["port"] <= wanted <= p.get("endPort", p["port"]) for p in ports)
                        if covers(data) or covers(last) or covers(low) or covers(high) or not ports:
                            self.assertTrue(covers(data) and covers(last) and covers(low) and covers(high), overlay)
                            reaching.append(rule["from"])
                self.assertEqual(reaching, [[{"podSelector": {"matchLabels": {"ferry.example/worker": "true"}}}]], overlay)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
