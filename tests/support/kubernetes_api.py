"""Fields of Kubernetes' objects (batch/v1, v1) and of KubeRay's (ray.io/v1), as far as examples have or may have them.

An API server refuses a field that it does not know, or drops it and says nothing. The names are those of the OpenAPI
description of Kubernetes (its Python client 37) and of KubeRay's Go types; a name in capitals is another object.
"""

from __future__ import annotations

import re
from typing import Any

_TEXT, _NUMBER, _FLAG, _QUANTITY = "text", "number", "flag", "quantity"

OBJECTS: dict[str, dict[str, str]] = {
    "JOB": {"apiVersion": _TEXT, "kind": _TEXT, "metadata": "META", "spec": "JOB_SPEC"},
    "META": {"name": _TEXT, "namespace": _TEXT, "generateName": _TEXT, "labels": "{text}", "annotations": "{text}"},
    "JOB_SPEC": {
        "activeDeadlineSeconds": _NUMBER, "backoffLimit": _NUMBER, "completionMode": _TEXT, "completions": _NUMBER,
        "parallelism": _NUMBER, "podReplacementPolicy": _TEXT, "suspend": _FLAG, "template": "POD",
        "ttlSecondsAfterFinished": _NUMBER,
    },
    "POD": {"metadata": "META", "spec": "POD_SPEC"},
    "POD_SPEC": {
        "activeDeadlineSeconds": _NUMBER, "containers": "[CONTAINER]", "initContainers": "[CONTAINER]", "hostIPC": _FLAG,
        "hostNetwork": _FLAG, "hostname": _TEXT, "nodeName": _TEXT, "nodeSelector": "{text}", "priorityClassName": _TEXT,
        "restartPolicy": _TEXT, "runtimeClassName": _TEXT, "schedulerName": _TEXT, "serviceAccountName": _TEXT,
        "subdomain": _TEXT, "terminationGracePeriodSeconds": _NUMBER, "volumes": "[VOLUME]",
    },
    "CONTAINER": {
        "args": "[text]", "command": "[text]", "image": _TEXT, "imagePullPolicy": _TEXT, "name": _TEXT,
        "resources": "RESOURCES", "stdin": _FLAG, "tty": _FLAG, "volumeMounts": "[MOUNT]", "workingDir": _TEXT,
    },
    "RESOURCES": {"limits": "{quantity}", "requests": "{quantity}"},
    "MOUNT": {"mountPath": _TEXT, "name": _TEXT, "readOnly": _FLAG, "subPath": _TEXT},
    "VOLUME": {"name": _TEXT, "persistentVolumeClaim": "CLAIM", "emptyDir": "EMPTY_DIR"},
    "CLAIM": {"claimName": _TEXT, "readOnly": _FLAG},
    "EMPTY_DIR": {"medium": _TEXT, "sizeLimit": _QUANTITY},
    "RAY_JOB": {"apiVersion": _TEXT, "kind": _TEXT, "metadata": "META", "spec": "RAY_JOB_SPEC"},
    "RAY_JOB_SPEC": {
        "activeDeadlineSeconds": _NUMBER, "backoffLimit": _NUMBER, "entrypoint": _TEXT, "rayClusterSpec": "RAY_CLUSTER",
        "runtimeEnvYAML": _TEXT, "shutdownAfterJobFinishes": _FLAG, "submissionMode": _TEXT, "submitterPodTemplate": "POD",
        "suspend": _FLAG, "ttlSecondsAfterFinished": _NUMBER,
    },
    "RAY_CLUSTER": {"headGroupSpec": "RAY_HEAD", "rayVersion": _TEXT, "workerGroupSpecs": "[RAY_WORKERS]", "suspend": _FLAG},
    "RAY_HEAD": {"rayStartParams": "{text}", "serviceType": _TEXT, "template": "POD"},
    "RAY_WORKERS": {
        "groupName": _TEXT, "maxReplicas": _NUMBER, "minReplicas": _NUMBER, "numOfHosts": _NUMBER,
        "rayStartParams": "{text}", "replicas": _NUMBER, "template": "POD",
    },
}  # fmt: skip
REQUIRED = {
    "JOB_SPEC": ("template",), "POD_SPEC": ("containers",), "CONTAINER": ("name",), "MOUNT": ("name", "mountPath"),
    "VOLUME": ("name",), "CLAIM": ("claimName",), "RAY_CLUSTER": ("headGroupSpec",), "RAY_HEAD": ("rayStartParams", "template"),
    "RAY_WORKERS": ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
}  # fmt: skip


def faults(value: Any, kind: str, where: str = "") -> list[str]:
    """What an API server would refuse: unknown and missing fields, values of another type."""
    if kind[0] in "[{":
        form: type[Any] = list if kind[0] == "[" else dict
        if not isinstance(value, form):
            return [f"{where} must be a {form.__name__}"]
        items = enumerate(value) if isinstance(value, list) else value.items()
        return [fault for name, item in items for fault in faults(item, kind[1:-1], f"{where}[{name}]")]
    if kind not in OBJECTS:
        return [] if _is(value, kind) else [f"{where} must be a {kind}: got {value!r}"]
    if not isinstance(value, dict):
        return [f"{where} must have fields"]
    fields = OBJECTS[kind]
    problems = [f"{where}.{name} is no field of {kind}" for name in value if name not in fields]
    problems += [f"{where}.{name} is missing" for name in REQUIRED.get(kind, ()) if name not in value]
    return problems + [
        fault for name in value if name in fields for fault in faults(value[name], fields[name], f"{where}.{name}")
    ]


def _is(value: Any, kind: str) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind == _QUANTITY:
        return number or (isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(m|[KMGTPE]i?|k)?", value) is not None)
    return {_TEXT: isinstance(value, str), _NUMBER: number, _FLAG: isinstance(value, bool)}[kind]
