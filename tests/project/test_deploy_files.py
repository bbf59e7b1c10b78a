"""Images, compose, Kubernetes and workflows: linted, and checked against published schemas. Nothing here needs an engine."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from epserve.config import load_config
from tests.hosts import kuberay

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
DOCKERFILES = ("docker/Dockerfile.cpu", "docker/Dockerfile.cuda")
SCRIPTS = ("docker/build.sh", "tests/hosts/fake_hosts.sh", "tests/hosts/chroot.sh")


def run(*words: str | Path, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_are_clean(name):
    run(BIN / "hadolint", "--failure-threshold", "style", name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts_are_clean(name):
    run(BIN / "shellcheck", name)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_as_a_user_and_say_how_they_are(name):
    text = (ROOT / name).read_text()
    last = text.rpartition("FROM ")[2]
    assert "USER 10001" in last and "HEALTHCHECK" in last and '"epserve.probe"' in last
    kind = name.rpartition(".")[2]
    steps = set(re.findall(r"build\.sh (system|python|user)(?: (\w+))?", text))
    assert steps == {("system", kind), ("python", kind), ("user", "")}, "the same steps that the chroot test runs"
    for source in re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_locked_requirements_are_hashed_and_agree_with_the_tested_versions(kind):
    text = (ROOT / "requirements" / f"{kind}.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert blocks and all("--hash=sha256:" in block for block in blocks)
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE))
    for name in locked.keys() & tested.keys():
        assert locked[name].partition("+")[0] == tested[name], name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w.-]+", line).group() for line in project["dependencies"]}  # type: ignore[union-attr]
    assert needed - locked.keys() == set(), "dependencies that the image lacks"
    assert kind == "cpu" or {"triton", "sgl-deep-ep", "nvshmem4py-cu13"} <= locked.keys()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / ".github" / "workflows").glob("*.yaml")))
def test_workflows_fit_githubs_schema(name):
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", f".github/workflows/{name}")


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yaml")]
    called = {target for text in texts for target in re.findall(r"run: make (\w+)", text)}
    assert {"env", "check", "test"} <= called <= targets


def test_compose_fits_its_schema_and_refers_to_what_exists():
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml")
    data = read("docker/compose.yaml")
    services = data["services"]
    assert {"head", "rank-0", "rank-1", "prometheus", "grafana"} <= services.keys()
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= services.keys(), name
        assert set(service.get("secrets", ())) <= data["secrets"].keys(), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (ROOT / "docker" / source).exists(), f"{name}: {source}"
            else:
                assert source in data["volumes"], f"{name}: {source}"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} is published beyond this machine"
    ranks = [name for name in services if name.startswith("rank-")]
    config = load_config(ROOT / "docker" / "service.yaml")
    assert config.engine.ranks == len(ranks)
    assert f"wait-nodes {len(ranks) + 1} " in services["head"]["command"][0]


def test_prometheus_finds_its_rules_here_and_in_the_container():
    (rules,) = read("docker/prometheus.yaml")["rule_files"]
    assert (ROOT / "docker" / rules).exists(), "promtool reads the path relative to the file"
    mounts = [each.split(":") for each in read("docker/compose.yaml")["services"]["prometheus"]["volumes"]]
    inside = {target: source for source, target, *_ in mounts}
    assert os.path.normpath(f"/etc/prometheus/{rules}") in inside


@pytest.fixture(scope="module")
def manifests(tmp_path_factory) -> list[dict]:
    """deploy/k8s as kustomize renders it, with secrets made for the occasion."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: its kustomize renders the manifests")
    folder = tmp_path_factory.mktemp("k8s") / "k8s"
    shutil.copytree(ROOT / "deploy" / "k8s", folder)
    (folder / "secrets").mkdir(exist_ok=True)
    for name in ("ray_auth_token", "tokens", "tls.crt", "tls.key", "ca.crt"):
        (folder / "secrets" / name).write_text("made for a test\n")
    done = run("kubectl", "kustomize", folder)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_kubernetes_kinds_fit_the_published_schemas(manifests):
    import kubernetes_validate

    checked = 0
    for manifest in manifests:
        if manifest["apiVersion"] != "ray.io/v1":
            kubernetes_validate.validate(manifest, "1.32", strict=True)
            checked += 1
    assert checked == len(manifests) - 1


def test_the_raycluster_fits_its_own_fields_and_its_pods_fit_the_published_schema(manifests):
    """KubeRay's CRD is in no package: its own fields are checked by tests/hosts/kuberay.py, the pods by Kubernetes' schema."""
    import kubernetes_validate

    (cluster,) = (manifest for manifest in manifests if manifest["kind"] == "RayCluster")
    jsonschema.Draft7Validator(kuberay.RAYCLUSTER).validate(cluster)
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(pod, "1.32", strict=True)


def test_the_raycluster_schema_refuses_a_misspelt_field(manifests):
    (cluster,) = (manifest for manifest in manifests if manifest["kind"] == "RayCluster")
    wrong = copy.deepcopy(cluster)
    wrong["spec"]["headGroupSpec"]["rayStartParam"] = wrong["spec"]["headGroupSpec"].pop("rayStartParams")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(kuberay.RAYCLUSTER).validate(wrong)


def test_pods_are_probed_confined_and_reach_only_each_other(manifests):
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    cluster = by_kind["RayCluster"]["spec"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    for group in groups:
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert "readinessProbe" in container and "livenessProbe" in container
        assert any(entry["name"] == "RAY_AUTH_TOKEN" for entry in container["env"])
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
    head = groups[0]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe"):
        assert head[probe]["exec"]["command"][:3] == ["python", "-m", "epserve.probe"]
    nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert f"wait-nodes {nodes} " in head["args"][0]
    gpus = sum(int(group["rayStartParams"]["num-gpus"]) * group["replicas"] for group in cluster["workerGroupSpecs"])
    config = load_config(ROOT / "deploy" / "k8s" / "config" / "service.yaml")
    assert config.engine.ranks == gpus and config.server.tls_cert is not None and config.server.tokens_file is not None
    policy = by_kind["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": by_kind["RayCluster"]["metadata"]["name"]}
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    for rule in policy["ingress"][1:]:
        assert rule["ports"], "only this cluster's own pods reach every port"


def test_no_secret_is_in_the_repository():
    listed = run("git", "ls-files", "deploy", "docker").stdout.split()
    assert listed and not [name for name in listed if "/secrets/" in name]
