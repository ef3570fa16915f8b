"""Files and flags of a cluster's components, for one node whose network namespace is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.cluster.node.images import PAUSE

NODE = "tandem-node"
NODE_ADDRESS = "10.99.0.2"
GATEWAY_ADDRESS = "10.99.0.1"
POD_NETWORK = "10.244.0.0/24"
SERVICE_NETWORK = "10.96.0.0/16"
API_ADDRESS = "10.96.0.1"
DNS_ADDRESS = "10.96.0.10"
DOMAIN = "cluster.local"
CGROUP = "tandem-cluster"
ETCD = "http://127.0.0.1:2379"

CONTAINERD = """\
version = 2
root = "{images}"
state = "{state}/containerd"
[grpc]
  address = "{state}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  netns_mounts_under_state_dir = true
  # A machine may let no process be preferred over others when memory is short.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def network() -> dict[str, Any]:
    """Return the network of pods: a bridge, and addresses that the node hands out."""
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isDefaultGateway": True,
                "hairpinMode": True,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_NETWORK}]]},
            }
        ],
    }


def kubelet(state: Path) -> dict[str, Any]:
    """Return the kubelet's configuration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{state}/pki/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": DOMAIN,
        "containerRuntimeEndpoint": f"unix://{state}/containerd.sock",
        # The machine's disk is not this cluster's alone.
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1Gi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "failSwapOn": False,
        "podLogsDir": f"{state}/logs",
        "resolvConf": f"{state}/resolv.conf",
        "volumePluginDir": f"{state}/plugins",
    }


def proxy(state: Path) -> dict[str, Any]:
    """Return kube-proxy's configuration."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": f"{state}/pki/proxy.kubeconfig"},
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": NODE,
        # These limits belong to the machine's own namespace.
        "conntrack": {
            "maxPerCore": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def write(state: Path, images: Path) -> None:
    """
    Write the files of containerd, the kubelet and kube-proxy.

    Args:
        state: Folder of the cluster.
        images: Folder of containerd's images, which outlives the cluster.
    """
    filled = CONTAINERD.format(images=images, state=state, pause=PAUSE)
    (state / "containerd.toml").write_text(filled)
    (state / "cni").mkdir()
    (state / "cni/pods.conflist").write_text(json.dumps(network()))
    (state / "kubelet.yaml").write_text(yaml.safe_dump(kubelet(state)))
    (state / "proxy.yaml").write_text(yaml.safe_dump(proxy(state)))
    (state / "resolv.conf").write_text("")


def etcd(state: Path) -> list[str]:
    """Return the flags of etcd."""
    peer = "http://127.0.0.1:2380"
    return [
        f"--data-dir={state}/etcd",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={peer}",
        "--unsafe-no-fsync",
    ]


def api_server(state: Path) -> list[str]:
    """Return the flags of kube-apiserver."""
    pki = state / "pki"
    return [
        f"--etcd-servers={ETCD}",
        f"--advertise-address={NODE_ADDRESS}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--cert-dir={state}/certificates",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/api-server.crt",
        f"--tls-private-key-file={pki}/api-server.key",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-account-key-file={pki}/tokens.key",
        f"--service-account-signing-key-file={pki}/tokens.key",
    ]


def _calling(state: Path, name: str) -> list[str]:
    file = state / f"pki/{name}.kubeconfig"
    kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [*(f"--{kind}={file}" for kind in kinds), "--leader-elect=false"]


def controller_manager(state: Path) -> list[str]:
    """Return the flags of kube-controller-manager."""
    return [
        *_calling(state, "controller-manager"),
        f"--cert-dir={state}/certificates",
        f"--root-ca-file={state}/pki/ca.crt",
        f"--service-account-private-key-file={state}/pki/tokens.key",
        "--use-service-account-credentials",
    ]


def scheduler(state: Path) -> list[str]:
    """Return the flags of kube-scheduler."""
    return [*_calling(state, "scheduler"), f"--cert-dir={state}/certificates"]


def kubelet_flags(state: Path) -> list[str]:
    """Return the flags of the kubelet."""
    return [
        f"--config={state}/kubelet.yaml",
        f"--kubeconfig={state}/pki/kubelet.kubeconfig",
        f"--root-dir={state}/kubelet",
        f"--cert-dir={state}/certificates",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_ADDRESS}",
    ]


def proxy_flags(state: Path) -> list[str]:
    """Return the flags of kube-proxy."""
    return [f"--config={state}/proxy.yaml"]
