"""The programs of the cluster, built from pinned Go modules: one folder under `tests/cluster/build` for each component,
with the go.mod and go.sum that pin it. A component is built once per content of its folder and flags and cached;
`ensure` returns the folder with its programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cluster.rig.cache import Cache, content_key
from cluster.rig.needs import NotPossibleHere

BUILD_FOLDER = Path(__file__).parent.parent / "build"

# Modules and compiled packages of all components; they only speed up rebuilds.
_MAX_GO_BYTES = 12 * 10**9
_GO_FLAGS = "-trimpath -buildvcs=false -mod=readonly -modcacherw"
# Downloads fail at times; a retry keeps what is complete.
_PAUSES_SECONDS = (5, 15, 45)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Cut:
    """What a build leaves out of the module `version_module`: most of a folder, and the code that names it.

    folder, files: the folder, and those of its source files that stay.
    switch, cases: a source file with one `switch` of strings, and the cases of it that stay beside the default.
    """

    folder: str
    files: tuple[str, ...]
    switch: str
    cases: tuple[str, ...]

    def apply(self, module: Path) -> None:
        """Raises ValueError: the module has no such files or cases."""
        sources = {path.name: path for path in (module / self.folder).glob("*.go")}
        for name in sources.keys() - set(self.files):
            sources[name].unlink()
        file = module / self.switch
        head, *cases = re.split(r"^(?=\t(?:case|default)\b)", file.read_text(), flags=re.MULTILINE)
        kept = [case for case in cases if re.match(rf'\tdefault:|\tcase "(?:{"|".join(self.cases)})":', case)]
        if len(kept) != len(self.cases) + 1 or not sources.keys() >= set(self.files):
            raise ValueError(f"{self.folder} or {self.switch} has changed: {self.files}, {self.cases}")
        file.write_text(head + "".join(kept))


@dataclass(frozen=True)
class Component:
    """One build: programs (name -> Go package) of one go.mod.

    version_module: the required module that defines the version of the component.
    cut: what is left out of that module, which must be one of the modules with files to copy.
    version_flags: link flags that write the version into the programs; `{version}` is replaced.
    tags: build tags.
    names: further names of a multi-call program (name -> program).
    protocols: files of required modules that are copied beside the programs (name -> (module, path)).
    minutes: how long a clean build takes on two cores, for the progress line.
    is_on_demand: built by the first test that needs it, not with all others.
    """

    name: str
    programs: Mapping[str, str]
    minutes: float = field(repr=False)  # not part of the key
    version_module: str = ""
    cut: Cut | None = field(default=None, repr=False)  # in the key by itself
    version_flags: tuple[str, ...] = ()
    tags: str = field(default="", repr=False)  # in the key as a Go flag
    names: Mapping[str, str] = field(default_factory=dict)
    protocols: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_on_demand: bool = field(default=False, repr=False)

    @property
    def go_flags(self) -> str:
        return f"{_GO_FLAGS} -tags={self.tags}" if self.tags else _GO_FLAGS


_KUBERNETES_VERSION = "k8s.io/component-base/version"
_KEDA = "github.com/kedacore/keda/v2"
_PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator"
_MONITORING_CRDS = "example/prometheus-operator-crd/monitoring.coreos.com"

COMPONENTS = {
    c.name: c
    for c in (
        Component(
            "containerd",
            {
                "containerd": "github.com/containerd/containerd/v2/cmd/containerd",
                "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
                "ctr": "github.com/containerd/containerd/v2/cmd/ctr",
            },
            minutes=1,
            version_module="github.com/containerd/containerd/v2",
            version_flags=("-X github.com/containerd/containerd/v2/version.Version={version}",),
        ),
        Component("pause", {"pause": "."}, minutes=0.1),
        Component("probe", {"probe": "."}, minutes=0.1),
        Component(
            "etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, minutes=0.5, version_module="go.etcd.io/etcd/server/v3"
        ),
        Component(
            "hyper",
            {"hyper": "."},
            minutes=4,
            version_module="k8s.io/kubernetes",
            version_flags=(
                f"-X {_KUBERNETES_VERSION}.gitVersion={{version}}",
                f"-X {_KUBERNETES_VERSION}.gitTreeState=clean",
                f"-X {_KUBERNETES_VERSION}.gitCommit=unknown",
                f"-X {_KUBERNETES_VERSION}.buildDate=1970-01-01T00:00:00Z",
            ),
            names=dict.fromkeys(
                ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
                "hyper",
            ),
            protocols={
                "deviceplugin.proto": ("k8s.io/kubelet", "pkg/apis/deviceplugin/v1beta1/api.proto"),
                "podresources.proto": ("k8s.io/kubelet", "pkg/apis/podresources/v1/api.proto"),
            },
        ),
        Component(
            "kubelet-protocols",
            {},
            minutes=0.1,
            protocols={
                "dra.proto": ("k8s.io/kubelet", "pkg/apis/dra/v1/api.proto"),
                "pluginregistration.proto": ("k8s.io/kubelet", "pkg/apis/pluginregistration/v1/api.proto"),
            },
        ),
        Component("coredns", {"coredns": "."}, minutes=0.7, version_module="github.com/coredns/coredns"),
        Component(
            "buildkit",
            {
                "buildctl": "github.com/moby/buildkit/cmd/buildctl",
                "buildkitd": "github.com/moby/buildkit/cmd/buildkitd",
            },
            minutes=1.4,
            version_module="github.com/moby/buildkit",
            version_flags=("-X github.com/moby/buildkit/version.Version={version}",),
        ),
        Component(
            "helm",
            {"helm": "helm.sh/helm/v4/cmd/helm"},
            minutes=1.5,
            version_module="helm.sh/helm/v4",
            version_flags=("-X helm.sh/helm/v4/internal/version.version={version}",),
        ),
        Component(
            "s3",
            {"versitygw": "github.com/versity/versitygw/cmd/versitygw"},
            minutes=1,
            version_module="github.com/versity/versitygw",
        ),
        Component("promql", {"promql": "."}, minutes=0.8, version_module="github.com/prometheus/prometheus"),
        Component(
            "prometheus",
            {
                "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
                "promtool": "github.com/prometheus/prometheus/cmd/promtool",
            },
            minutes=2,
            version_module="github.com/prometheus/prometheus",
            tags="remove_all_sd,enable_kubernetes_sd",  # without the clients of clouds: most of a build
        ),
        Component(
            "kube-score",
            {"kube-score": "github.com/zegl/kube-score/cmd/kube-score"},
            minutes=0.4,
            version_module="github.com/zegl/kube-score",
        ),
        Component(
            "monitoring",
            {"scrape-config": "."},
            minutes=2,
            version_module=_PROMETHEUS_OPERATOR,
        ),
        Component(
            "keda",
            {"keda-operator": f"{_KEDA}/cmd/operator", "keda-adapter": f"{_KEDA}/cmd/adapter"},
            minutes=5,
            version_module=_KEDA,
            # Every other scaler brings the SDK of its service.
            cut=Cut(
                folder="pkg/scalers",
                # That of Azure has a constant of all.
                files=("scaler.go", "external_scaler.go", "prometheus_scaler.go", "azure_queue_scaler.go"),
                switch="pkg/scaling/scalers_builder.go",
                cases=("external", "external-push", "prometheus"),
            ),
            version_flags=(f"-X {_KEDA}/version.Version={{version}}",),
            protocols={
                **{
                    f"{kind}.yaml": (_KEDA, f"config/crd/bases/{kind}.yaml")
                    for kind in (
                        "eventing.keda.sh_cloudeventsources",
                        "eventing.keda.sh_clustercloudeventsources",
                        "keda.sh_clustertriggerauthentications",
                        "keda.sh_scaledjobs",
                        "keda.sh_scaledobjects",
                        "keda.sh_triggerauthentications",
                    )
                },
                "role.yaml": (_KEDA, "config/rbac/role.yaml"),
                "role_binding.yaml": (_KEDA, "config/rbac/role_binding.yaml"),
                "adapter_role_binding.yaml": (_KEDA, "config/metrics-server/role_binding.yaml"),
                "api_service.yaml": (_KEDA, "config/metrics-server/api_service.yaml"),
            },
            is_on_demand=True,
        ),
        Component(
            "crds",
            {},
            minutes=0.1,
            protocols={
                "scaledobjects.yaml": (_KEDA, "config/crd/bases/keda.sh_scaledobjects.yaml"),
                **{
                    f"{kind}.yaml": (_PROMETHEUS_OPERATOR, f"{_MONITORING_CRDS}_{kind}.yaml")
                    for kind in ("podmonitors", "prometheusrules")
                },
                "httproutes.yaml": (
                    "sigs.k8s.io/gateway-api",
                    "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
                ),
            },
        ),
    )
}

# The components of a running cluster. The others are tools for tests.
CLUSTER_COMPONENTS = ("containerd", "pause", "etcd", "hyper", "coredns")


def pinned_version(component: Component, build_folder: Path = BUILD_FOLDER) -> str:
    """The version that the component's go.mod requires, "" for our own source.

    Raises:
        ValueError: go.mod does not require the module.
    """
    if not component.version_module:
        return ""
    go_mod = build_folder / component.name / "go.mod"
    pattern = rf"^\s*(?:require\s+)?{re.escape(component.version_module)} (v\S+)"
    match = re.search(pattern, go_mod.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{go_mod} does not require {component.version_module}")
    return match[1]


def ensure(*names: str, cache: Cache | None = None, say: Callable[[str], None] = print) -> dict[str, Path]:
    """Folders with the programs of the components `names`, built where the cache has none.

    Raises:
        NotPossibleHere: Go is missing or a build failed; the message has the reason.
        KeyError: no component of that name.
    """
    cache = cache or Cache.default()
    return {name: _ensure(COMPONENTS[name], cache, say) for name in names}


def _ensure(component: Component, cache: Cache, say: Callable[[str], None]) -> Path:
    source = BUILD_FOLDER / component.name
    cut = (repr(component.cut),) if component.cut else ()
    key = content_key(repr(component), component.go_flags, *cut, source)

    def build(folder: Path) -> None:
        started = time.monotonic()
        title = f"{component.name} {pinned_version(component)}".strip()
        say(f"building {title} (about {component.minutes:g} min on two cores)")
        with cache.lock("go", on_wait=lambda: say(f"{component.name} waits for another build")):
            _build(component, source, folder, cache.folder("go"), say)
            cache.bound("go", _MAX_GO_BYTES)
        say(f"built {title} in {time.monotonic() - started:.0f} s")

    return cache.entry("bin", component.name, key, build)


def _build(component: Component, source: Path, folder: Path, go_cache: Path, say: Callable[[str], None]) -> None:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise NotPossibleHere(
            f"Go is needed to build {component.name}: install it (1.26 or newer) so that `go` is in PATH"
        )
    caches = {"GOCACHE": str(go_cache / "build"), "GOMODCACHE": str(go_cache / "modules")}
    environment = {**os.environ, **caches, "CGO_ENABLED": "0", "GOFLAGS": component.go_flags, "GOWORK": "off"}
    version = pinned_version(component)
    flags = " ".join(["-s -w", *(flag.format(version=version) for flag in component.version_flags)])

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [go, *arguments], cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()
            raise NotPossibleHere(f"building {component.name} failed: {' | '.join(reason[-3:])}")
        return done.stdout.strip()

    def fetch() -> dict[str, Path]:
        """The folders of modules with files to copy."""
        modules = {module for module, _ in component.protocols.values()}
        return {module: Path(json.loads(run("mod", "download", "-json", module))["Dir"]) for module in modules}

    folders = _persistently(fetch, say)
    with tempfile.TemporaryDirectory() as scratch:
        if component.cut is not None:
            rest = Path(shutil.copytree(folders[component.version_module], f"{scratch}/rest"))
            component.cut.apply(rest)
            go_mod = Path(scratch) / "go.mod"
            go_mod.write_text(f"{(source / 'go.mod').read_text()}\nreplace {component.version_module} => {rest}\n")
            shutil.copyfile(source / "go.sum", go_mod.with_name("go.sum"))
            environment["GOFLAGS"] += f" -modfile={go_mod}"
        if component.programs:  # downloads every module that the build reads
            _persistently(lambda: run("list", "-deps", *component.programs.values()), say)
        for program, package in component.programs.items():
            run("build", "-ldflags", flags, "-o", str(folder / program), package)
    for name, program in component.names.items():
        (folder / name).symlink_to(program)
    for name, (module, path) in component.protocols.items():
        shutil.copyfile(folders[module] / path, folder / name)


def _persistently(act: Callable[[], _Result], say: Callable[[str], None]) -> _Result:
    for pause_seconds in _PAUSES_SECONDS:
        try:
            return act()
        except NotPossibleHere as failure:
            say(f"{failure}; again in {pause_seconds} s")
            time.sleep(pause_seconds)
    return act()


def main(names: list[str]) -> int:
    """`python -m cluster.rig.binaries [NAME...]`: builds, then prints each component's folder. Without a name: all but
    those on demand."""
    unknown = sorted(set(names) - set(COMPONENTS))
    if unknown:
        print(f"no such component: {' '.join(unknown)}; there are {' '.join(COMPONENTS)}", file=sys.stderr)
        return 2
    try:
        for name in names or (c.name for c in COMPONENTS.values() if not c.is_on_demand):
            for path in ensure(name, say=lambda line: print(line, flush=True)).values():
                print(f"{name}\t{path}", flush=True)
    except NotPossibleHere as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
