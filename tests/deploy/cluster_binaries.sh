#!/usr/bin/env bash
# cluster_binaries.sh DIR: what `make cluster-test` needs besides Debian's packages, from the proxy of Go modules and from Maven, into DIR:
# Kubernetes, helm, the objects of KEDA and Prometheus' operator, Strimzi's model, and the programs of the test's images.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
V=1.37.2 HELM=3.22.0 KEDA=2.21.0 PROMETHEUS=0.85.0
export CGO_ENABLED=0 GOFLAGS=-mod=mod
built() { local made; for made in "$@"; do [ -x "$made" ] || return 1; done; }

if ! built kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; then
  # Kubernetes replaces its own modules by folders, which `go install` refuses: here their releases replace them.
  work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
  (
    cd "$work"
    echo "module fetch" > go.mod
    kubernetes=$(go mod download -json "k8s.io/kubernetes@v$V" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    cp "$kubernetes/go.sum" .
    {
      printf 'module build\ngo 1.26.0\nrequire k8s.io/kubernetes v%s\nreplace (\n' "$V"
      sed -n 's#^\t\(k8s.io/[a-z-]*\) => ./staging.*#\1#p' "$kubernetes/go.mod" | while read -r module; do echo "  $module => $module v0.${V#1.}"; done
      echo ")"
    } > go.mod
    flags="-s -w -X k8s.io/component-base/version.gitVersion=v$V -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${V:2:2}"
    for program in kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; do
      echo "building $program"
      go build -trimpath -ldflags "$flags" -o "$OLDPWD/" "k8s.io/kubernetes/cmd/$program"
    done
  )
fi
built helm || GOBIN=$PWD go install -ldflags "-s -w -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=${V:2:2}" "helm.sh/helm/v3/cmd/helm@v$HELM"

# fetch MODULE FOLDER: YAML files of a Go module.
fetch() { cp -n "$(cd "$(mktemp -d)" && echo 'module fetch' > go.mod && go mod download -json "$1" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')/$2"/*.yaml crds/ && chmod -R u+w crds; }
[ -d crds ] || { mkdir crds && fetch "github.com/kedacore/keda/v2@v$KEDA" config/crd/bases && fetch "github.com/prometheus-operator/prometheus-operator@v$PROMETHEUS" example/prometheus-operator-crd && rm -f crds/kustomization.yaml; }
[ -d strimzi ] || mvn -q -f "$here/strimzi.xml" dependency:copy-dependencies -DoutputDirectory="$PWD/strimzi"
[ -x pause ] || printf '#include <signal.h>\n#include <unistd.h>\nint main(void) { signal(SIGTERM, _exit); signal(SIGCHLD, SIG_IGN); for (;;) pause(); }\n' | gcc -static -O1 -x c -o pause -
