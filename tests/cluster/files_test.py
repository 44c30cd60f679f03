#!/usr/bin/env python3
"""What operators of a cluster get, looked at as far as the machine has the tools: units, manifests, compose, alerts, dashboard, Envoy's
configuration. tests/cluster/files_test.py BUILD_FOLDER; that it works when it is started is cluster_test.py's.

Tools that are not there skip their test, with a word: ./run test installs them."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools/cluster"))

from cluster import find_parts  # noqa: E402
from clusters import clusters  # noqa: E402

DEPLOY = ROOT / "deploy/cluster"
VERSION = re.search(r"project\(carrel VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
BUILD = pathlib.Path(".")


def run(*command, environment=None, given=None):
    done = subprocess.run([str(one) for one in command], input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, **(environment or {})}, check=False)
    return done.returncode, done.stdout


def needs(test, tool):
    if shutil.which(tool) is None:
        test.skipTest(f"{tool} is not installed")


def documents(test, path):
    try:
        import yaml
    except ImportError:
        test.skipTest("python3-yaml is not installed")
    return list(yaml.safe_load_all(path.read_text()))


def metric_names(text):
    return set(re.findall(r"\b(?:carrel|envoy)_[a-z0-9_]+", text))


class Files(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="carrel-files-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_units_are_valid_and_confined(self):
        needs(self, "systemd-analyze")
        programs = {"/usr/bin/carrel": BUILD / "carrel", "/usr/local/bin/envoy": "/bin/true", "/usr/sbin/nats-server": "/bin/true"}
        drop_in = self.folder / "carrel-.service.d"
        drop_in.mkdir()
        shutil.copy(DEPLOY / "systemd/carrel-.service.d/10-confined.conf", drop_in)
        units = sorted((DEPLOY / "systemd").glob("*.service"))
        for unit in units:
            text = unit.read_text()
            for place, program in programs.items():
                text = text.replace(f"ExecStart={place} ", f"ExecStart={program} ")
            (self.folder / unit.name).write_text(text)
        environment = {"SYSTEMD_UNIT_PATH": f"{self.folder}:"}
        for unit in units:
            self.assertEqual(run("systemd-analyze", "verify", self.folder / unit.name, environment=environment), (0, ""), unit.name)
            # Exposure in tenths: at most 2.0.
            code, said = run("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", self.folder / unit.name,
                             environment=environment)
            self.assertEqual(code, 0, said)
        self.assertEqual({unit.stem for unit in units}, {f"carrel-{what}" for what in ("serve", "api", "worker", "router", "queue")})

    def test_manifests_are_confined_and_name_what_is_there(self):
        kustomization = documents(self, DEPLOY / "kustomization.yaml")[0]
        maps = {one["name"]: set(one["files"]) for one in kustomization["configMapGenerator"]}
        for files in maps.values():
            for name in files:
                self.assertTrue((DEPLOY / name).is_file(), name)
        kinds, pods = {}, {}
        for resource in kustomization["resources"]:
            for document in documents(self, DEPLOY / resource):
                kinds.setdefault(document["kind"], []).append(document)
        for document in kinds["Deployment"]:
            name, spec = document["metadata"]["name"], document["spec"]["template"]["spec"]
            pods[document["spec"]["template"]["metadata"]["labels"]["app"]] = spec
            self.assertTrue(spec["securityContext"]["runAsNonRoot"], name)
            volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
            volumes.update({claim["metadata"]["name"]: {} for claim in document["spec"].get("volumeClaimTemplates", [])})
            for container in spec["containers"]:
                self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"], name)
                self.assertTrue({"readinessProbe", "livenessProbe"} <= set(container), name)
                self.assertRegex(container["image"], r":.+", "without a tag it would be pulled each time")
                if "carrel" in container["image"]:
                    self.assertEqual(container["image"], f"carrel:{VERSION}")
                for mount in container["volumeMounts"]:
                    self.assertIn(mount["name"], volumes, name)
            for volume in volumes.values():
                if "configMap" in volume:
                    self.assertIn(volume["configMap"]["name"], maps, name)
        for kind in ("Service", "PodDisruptionBudget"):
            for document in kinds[kind]:
                selector = document["spec"]["selector"]
                self.assertIn(selector.get("matchLabels", selector)["app"], pods, document["metadata"]["name"])
        self.assertTrue({"carrel-serve", "carrel-api", "carrel-router", "carrel-worker", "carrel-queue"} <= set(pods))
        # What Envoy looks up are headless Services, and no other name.
        headless = {document["metadata"]["name"] for document in kinds["Service"] if document["spec"].get("clusterIP") == "None"}
        self.assertLessEqual(set(re.findall(r"address: (carrel-\w+),", (DEPLOY / "clusters.yaml").read_text())), headless)
        adapter = (DEPLOY / "kubernetes/adapter.yaml").read_text()
        scaled = {metric["pods"]["metric"]["name"] if "pods" in metric else metric["external"]["metric"]["name"]
                  for document in kinds["HorizontalPodAutoscaler"] for metric in document["spec"]["metrics"]}
        self.assertGreaterEqual(len(scaled), 4)
        for name in scaled:
            self.assertIn(name.removeprefix("carrel_"), adapter, "prometheus-adapter hands it on")

    def test_manifests_are_valid(self):
        needs(self, "kubernetes-validate")
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
            if path.name in ("adapter.yaml", "podmonitor.yaml"):
                continue  # values of a chart; a resource of an operator
            code, said = run("kubernetes-validate", path)
            self.assertEqual(code, 0, said)

    def test_compose_names_what_is_there(self):
        compose = documents(self, DEPLOY / "compose.yaml")[0]
        for name, service in compose["services"].items():
            self.assertIn(":", service["image"] + ("" if name != "prometheus" else ":"), name)
            if "carrel" in name:
                self.assertEqual(service["image"], f"carrel:{VERSION}")
                self.assertTrue(service["read_only"], name)
            for volume in service.get("volumes", []):
                source = volume.rsplit(":", 2)[0] if volume.endswith(":ro") else volume.split(":")[0]
                if source.startswith("."):
                    self.assertTrue((DEPLOY / source).exists(), f"{name}: {source}")
                elif not source.startswith("$"):
                    self.assertIn(source, compose["volumes"], name)
            for other in service.get("depends_on", []):
                self.assertIn(other, compose["services"], name)

    def test_router_is_valid(self):
        parts = find_parts()
        if parts is None:
            self.skipTest("envoy is not here: ./run deps cluster")
        (self.folder / "clusters.yaml").write_text(clusters())
        (self.folder / "envoy.yaml").write_text((DEPLOY / "envoy.yaml").read_text().replace("/etc/envoy", str(self.folder)))
        code, said = run(parts / "envoy", "--mode", "validate", "-c", self.folder / "envoy.yaml")
        self.assertEqual(code, 0, said)
        self.assertNotIn("eprecated", said)

    def test_clusters_takes_addresses_and_refuses_what_is_none(self):
        program = ROOT / "tools/cluster/clusters.py"
        code, said = run(sys.executable, program, "--serve", "10.0.0.1:50051", "--serve", "10.0.0.2:50051", "--api", "host-a:8080")
        self.assertEqual(code, 0)
        self.assertEqual(len(re.findall(r'address: "10\.0\.0\.[12]", port_value: 50051', said)), 2)
        self.assertIn('address: "host-a", port_value: 8080', said)
        self.assertNotIn("carrel-serve, port_value", said)
        for bad in ("10.0.0.1", "10.0.0.1:", "10.0.0.1:70000", 'a"b:1', ":5"):
            code, said = run(sys.executable, program, "--serve", bad)
            self.assertEqual(code, 2, bad)
            self.assertIn(f'"{bad}" is not HOST:PORT', said)

    def test_secrets_are_drawn_once_and_for_their_owner_alone(self):
        where = self.folder / "out"
        self.assertEqual(run(DEPLOY / "secrets", where), (0, f"{where}\n"))
        files = {name: (where / name).read_text() for name in ("s3.json", ".env", "carrel.env", "worker.env", "queue.env")}
        for name, text in files.items():
            self.assertEqual((where / name).stat().st_mode & 0o777, 0o600, name)
            self.assertNotIn("CHANGE", text, name)
        identities = {one["name"]: one["credentials"][0] for one in json.loads(files["s3.json"])["identities"]}
        self.assertEqual(len({one["secretKey"] for one in identities.values()}), 3)
        for file, name in (("carrel.env", "replica"), ("worker.env", "worker")):
            self.assertIn(f"AWS_ACCESS_KEY_ID={identities[name]['accessKey']}\n", files[file])
            self.assertIn(f"AWS_SECRET_ACCESS_KEY={identities[name]['secretKey']}\n", files[file])
        code, said = run(DEPLOY / "secrets", where)
        self.assertEqual(code, 1)
        self.assertIn("s3.json is there", said)
        self.assertEqual((where / "s3.json").read_text(), files["s3.json"])

    def test_alerts_do_what_their_tests_say(self):
        needs(self, "promtool")
        prometheus = ROOT / "deploy/prometheus"
        for name in ("alerts.yaml", "cluster_alerts.yaml"):
            shutil.copy(prometheus / name, self.folder)
        shutil.copy(DEPLOY / "prometheus.yaml", self.folder / "prometheus.yml")
        for command in (("check", "rules", prometheus / "cluster_alerts.yaml"), ("test", "rules", prometheus / "cluster_alerts_test.yaml"),
                        ("check", "config", self.folder / "prometheus.yml")):
            code, said = run("promtool", *command)
            self.assertEqual(code, 0, said)

    def test_alerts_have_their_sections(self):
        runbook = (ROOT / "docs/cluster.md").read_text()
        alerts = re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/cluster_alerts.yaml").read_text())
        self.assertGreaterEqual(len(alerts), 8)
        for alert in alerts:
            self.assertIn(f"### {alert}\n", runbook)

    def test_dashboard_has_a_query_in_every_panel(self):
        dashboard = json.loads((ROOT / "deploy/grafana/cluster.json").read_text())
        self.assertGreaterEqual(len(dashboard["panels"]), 10)
        for panel in dashboard["panels"]:
            self.assertTrue(panel["targets"], panel["title"])
            for target in panel["targets"]:
                self.assertTrue(metric_names(target["expr"]), panel["title"])

    def test_fetch_refuses_what_it_does_not_know(self):
        code, said = run(ROOT / "tools/cluster/fetch")
        self.assertEqual((code, said.startswith("usage: ")), (2, True))
        code, said = run(ROOT / "tools/cluster/fetch", self.folder, "nonsense")
        self.assertEqual((code, said.startswith("usage: ")), (2, True))
        # What is there and is not what it should be is fetched again, or said: never taken.
        (self.folder / "bin").mkdir()
        (self.folder / "bin/nats-server").write_text("#!/bin/sh\n")
        empty = self.folder / "nothing"
        empty.mkdir()
        for tool in ("apt-get", "dpkg-deb"):
            (empty / tool).write_text("#!/bin/sh\nexit 100\n")
            (empty / tool).chmod(0o755)
        code, said = run(ROOT / "tools/cluster/fetch", self.folder, "nats-server", environment={"PATH": f"{empty}:{os.environ['PATH']}"})
        self.assertEqual(code, 1, said)
        self.assertIn("could not download nats-server", said)
        self.assertEqual([path.name for path in self.folder.glob("unpack.*")], [])

    def test_simulation_counts(self):
        code, said = run(sys.executable, "-B", ROOT / "tools/cluster/sim.py", "--replicas", "4", "--slots", "8", "--contexts", "40", "--questions",
                         "1500", "--zipf", "0.8", "--policy", "ring", "bounded")
        self.assertEqual(code, 0, said)
        rows = {cells[3].strip(): [float(cell) for cell in cells[4:8]] for cells in (line.split("|") for line in said.splitlines()[2:4])}
        for hits, after, busiest, _ in rows.values():
            self.assertTrue(0.3 < hits < 1 and 0.2 < after < 1 and busiest >= 1, said)
        self.assertLess(rows["bounded"][2], rows["ring"][2], "the bound spreads load")
        code, said = run(sys.executable, "-B", ROOT / "tools/cluster/sim.py", "--replicas", "1", "--slots", "8")
        self.assertEqual(code, 2)


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main(verbosity=2)
