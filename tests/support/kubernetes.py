"""A Kubernetes of two nodes in this process's own network and mount namespace: `make cluster-test` makes them.

Nothing in it has a route to another machine, and nothing of it remains: addresses, mounts and processes end with the namespaces. The
kubelet's three sysctls and the groups of its containers are the machine's: `close` restores the former and removes the latter.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.paths import ROOT
from tests.support.value_sets import BINARIES
from tests.support.waiting import until

WAIT_S = 1800.0
GATEWAY, NODES = "192.0.2.1", {"n1": "192.0.2.2", "n2": "192.0.2.3"}
"""Addresses for documentation (RFC 5737), which no machine has."""
IMAGES = ("localhost/penstock:1", "localhost/penstock:2")
TOKEN = "test-token"
API = "https://127.0.0.1:6443"
SYSCTLS = [Path("/proc/sys", name) for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")]
PODS = Path("/sys/fs/cgroup/cpu/k8s.io")
"""Control group of all pods. With the CPU share of one process they would hardly run on a busy machine."""
SHARED_FOLDERS = {"usr": "/usr", "python": sys.base_prefix, "checkout": str(ROOT), "environment": sys.prefix}
"""What the containers of the test's images have from this machine: its system, its Python, and this checkout with its environment."""
_NEEDED = ("etcd", "containerd", "ctr", "runc", "ip", "prometheus")


def missing() -> list[str]:
    """Names of what this machine lacks for such a cluster."""
    programs = [name for name in _NEEDED if shutil.which(name) is None]
    programs += [str(BINARIES / name) for name in ("kube-apiserver", "kubelet", "helm", "crds", "pause") if not (BINARIES / name).exists()]
    return programs if Path("/usr/lib/cni/bridge").exists() else [*programs, "/usr/lib/cni/bridge"]


class Kubernetes:
    """The cluster; `close` ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, dict[str, subprocess.Popen[bytes]]()
        self.sysctls = {path: path.read_text() for path in SYSCTLS}
        with contextlib.suppress(OSError):  # cgroup v2
            PODS.mkdir(exist_ok=True)
            (PODS / "cpu.shares").write_text("8192")
        for path in ("/run", "/var/lib", "/var/log"):  # what runtimes write outside their own folders ends with the mount namespace
            _run("mount", "-t", "tmpfs", "tmpfs", path)
        for words in ("link set lo up", "link add cni0 type bridge", "link set cni0 up"):
            _run("ip", *words.split())
        for address in (GATEWAY, *NODES.values()):
            _run("ip", "address", "add", f"{address}/24", "dev", "cni0")
        self._control_plane()
        self.archives = [self._archive("localhost/pause:1", {"pause": (BINARIES / "pause").read_bytes()}, ["/pause"])]
        command = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import main; sys.exit(main())"]
        self.archives += [self._archive(name, {"release": name.encode()}, command) for name in IMAGES]
        for name in NODES:
            self.start_node(name)

    def close(self) -> None:
        """End all processes, and restore what the kubelet has changed on this machine."""
        self.kubectl("delete", "pods", "--all", "--grace-period=1", "--wait=true", check=False)
        for name in NODES:
            self.lose_node(name)
        for program in self.programs.values():
            program.kill()
        for path, text in self.sysctls.items():
            path.write_text(text)
        wait_for(_without_groups, "the groups of killed containers are empty")

    def kubectl(self, *words: str, text: str | None = None, check: bool = True) -> str:
        """The output of kubectl; a warning of the server fails as an error does."""
        command = [str(BINARIES / "kubectl"), "--kubeconfig", str(self.folder / "kubeconfig"), "--warnings-as-errors", *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Any:
        """Objects, as kubectl prints them."""
        return json.loads(self.kubectl("get", *words, "--output", "json"))

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl("apply", "--server-side", "--filename", "-", text=yaml.safe_dump_all(objects))

    def helm(self, *words: str, values: Mapping[str, Any]) -> None:
        environment = {**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)}
        command = [str(BINARIES / "helm"), *words, "--values", "-"]
        done = subprocess.run(
            command, input=json.dumps(values), capture_output=True, text=True, check=False, env=environment, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr

    def pods(self, selector: str) -> list[Any]:
        """Pods that are not being deleted."""
        return [pod for pod in self.get("pods", "--selector", selector)["items"] if "deletionTimestamp" not in pod["metadata"]]

    def start_node(self, name: str) -> None:
        """Start a node's containerd and kubelet, unless they run."""
        if f"kubelet-{name}" in self.programs:
            return
        folder = self.folder / name
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        socket = folder / "containerd.sock"
        (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder))
        (folder / "cni" / "bridge.conflist").write_text(json.dumps(NETWORK))
        self._start(f"containerd-{name}", "containerd", "--config", str(folder / "containerd.toml"))
        ctr = ("ctr", "--address", str(socket), "--namespace", "k8s.io", "images", "import")
        wait_for(lambda: all(_runs(*ctr, str(archive)) for archive in self.archives), f"containerd of {name} has the images")
        first = list(NODES).index(name) == 0
        ports = {"port": 10250, "healthzPort": 10248} if first else {"port": 10350, "healthzPort": 10348}
        settings = {**KUBELET, **ports, "containerRuntimeEndpoint": f"unix://{socket}", "podLogsDir": str(folder / "logs")}
        (folder / "kubelet.yaml").write_text(yaml.safe_dump(settings))
        self._start(
            f"kubelet-{name}", str(BINARIES / "kubelet"), f"--config={folder}/kubelet.yaml", f"--kubeconfig={self.folder}/kubeconfig",
            f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/certificates", f"--hostname-override={name}", f"--node-ip={NODES[name]}",
        )  # fmt: skip
        wait_for(lambda: self.is_ready(name), f"node {name} is ready")

    def is_ready(self, name: str) -> bool:
        nodes = {node["metadata"]["name"]: node for node in self.get("nodes")["items"]}
        conditions = nodes[name]["status"].get("conditions", []) if name in nodes else []
        return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

    def lose_node(self, name: str) -> None:
        """Kill everything that runs on a node at once, as a power cut does."""
        for part in ("kubelet", "containerd"):
            if (program := self.programs.pop(f"{part}-{name}", None)) is not None:
                program.kill()
                program.wait()
        shims = [each for each in psutil.process_iter(["cmdline"]) if str(self.folder / name) in " ".join(each.info["cmdline"] or ())]
        for process in [below for shim in shims for below in (shim, *shim.children(recursive=True))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _start(self, name: str, *command: str) -> None:
        output = (self.folder / f"{name}.log").open("ab")
        self.programs[name] = subprocess.Popen(command, stdout=output, stderr=output, cwd=self.folder)
        output.close()

    def _control_plane(self) -> None:
        files = self.folder
        _run("openssl", "genrsa", "-out", str(files / "key"), "2048")
        (files / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
        (files / "kubeconfig").write_text(json.dumps(KUBECONFIG))
        etcd = "http://127.0.0.1:2379"
        self._start("etcd", "etcd", "--data-dir", "/run/etcd", "--listen-client-urls", etcd, "--advertise-client-urls", etcd)
        self._start(
            "apiserver", str(BINARIES / "kube-apiserver"), f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1", f"--advertise-address={GATEWAY}",
            "--endpoint-reconciler-type=none", f"--cert-dir={files}/certificates", "--service-account-issuer=https://kubernetes.default",
            f"--service-account-key-file={files}/key", f"--service-account-signing-key-file={files}/key",
            f"--token-auth-file={files}/tokens.csv",
            "--service-cluster-ip-range=198.51.100.0/24", "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
            "--default-not-ready-toleration-seconds=5", "--default-unreachable-toleration-seconds=5",
        )  # fmt: skip
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", "the API server is ready")
        for program, more in {
            "kube-controller-manager": [f"--service-account-private-key-file={files}/key", "--node-monitor-grace-period=20s"],
            "kube-scheduler": [],
        }.items():
            common = [
                f"--kubeconfig={files}/kubeconfig",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--cert-dir={files}/{program}",
            ]
            self._start(program, str(BINARIES / program), *common, *more)

    def _archive(self, name: str, contents: Mapping[str, bytes], entrypoint: list[str]) -> Path:
        """An image whose only layer has these files, and links into /usr as Debian has them."""
        path = self.folder / f"{name.replace('/', '-')}.tar"
        layer = _tar(contents.items(), links={each: f"usr/{each}" for each in ("bin", "lib", "lib64")})
        digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
        settings = {
            "Entrypoint": entrypoint,
            "Env": ["USER=penstock", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"],
            "WorkingDir": str(ROOT),
        }
        image = {"architecture": "amd64", "os": "linux", "config": settings, "rootfs": {"type": "layers", "diff_ids": [digest]}}
        manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        parts = {"layer.tar": layer, "config.json": json.dumps(image).encode(), "manifest.json": json.dumps(manifest).encode()}
        path.write_bytes(_tar(parts.items()))
        return path


wait_for = partial(until, limit_s=WAIT_S, every_s=0.5)


def _without_groups() -> bool:
    """Remove the control groups of containers; False if a process is still in one."""
    for group in sorted(Path("/sys/fs/cgroup").glob("*/k8s.io/**/"), reverse=True):
        with contextlib.suppress(OSError):
            group.rmdir()
    return not list(Path("/sys/fs/cgroup").glob("*/k8s.io"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)


def _runs(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True, timeout=WAIT_S).returncode == 0


def _tar(contents: Iterable[tuple[str, bytes]], *, links: Mapping[str, str] | None = None) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, data in contents:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return written.getvalue()


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "test", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
    "users": [{"name": "test", "user": {"token": TOKEN}}],
    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    "current-context": "test",
}
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "address": "127.0.0.1",
    "healthzBindAddress": "127.0.0.1",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    # A node next to others on a machine without systemd, whose root cannot raise its limits.
    "failCgroupV1": False,
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failSwapOn": False,
    "oomScoreAdj": 0,
    "maxOpenFiles": 20000,
    "makeIPTablesUtilChains": False,
    "localStorageCapacityIsolation": False,
    "evictionHard": {},
    "imageGCHighThresholdPercent": 100,
}
CONTAINERD = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
disable_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.16", "gateway": GATEWAY}]]},
        }
    ],
}
