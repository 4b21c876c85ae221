"""Whether a live object must be applied again: not for defaults and foreign additions, else for any difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from neuron_operator.api.names import FIELD_MANAGER
from neuron_operator.cluster import containment
from neuron_operator.cluster.containment import Contained, needs_apply

Edit = Callable[[dict[str, Any]], object]

DESIRED: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "chat", "namespace": "ns", "labels": {"a": "1"}},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"m": "chat"}},
        "template": {
            "spec": {
                "automountServiceAccountToken": False,
                "containers": [
                    {
                        "name": "runtime",
                        "args": ["serve", "--x"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                        "ports": [{"containerPort": 8000}],
                        "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi", "aws.amazon.com/neuron": 6}},
                        "volumeMounts": [],
                    }
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            }
        },
    },
}
OWNED: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:a": {}}},
    "f:spec": {
        "f:replicas": {},
        "f:selector": {},
        "f:template": {
            "f:spec": {
                "f:automountServiceAccountToken": {},
                "f:containers": {
                    'k:{"name":"runtime"}': {
                        ".": {},
                        "f:name": {},
                        "f:args": {},
                        "f:env": {
                            'k:{"name":"A"}': {".": {}, "f:name": {}, "f:value": {}},
                            'k:{"name":"B"}': {".": {}, "f:name": {}, "f:value": {}},
                        },
                        "f:ports": {'k:{"containerPort":8000,"protocol":"TCP"}': {".": {}, "f:containerPort": {}}},
                        "f:resources": {
                            "f:limits": {"f:cpu": {}, "f:memory": {}, "f:aws.amazon.com/neuron": {}},
                        },
                    }
                },
                "f:volumes": {'k:{"name":"tmp"}': {".": {}, "f:name": {}, "f:emptyDir": {}}},
            }
        },
    },
}


def live(operation: str = "Apply") -> dict[str, Any]:
    """DESIRED as the API server returns it."""
    obj = copy.deepcopy(DESIRED)
    obj["metadata"] |= {"uid": "u", "generation": 1}
    entry = {"manager": FIELD_MANAGER, "operation": operation, "fieldsV1": copy.deepcopy(OWNED)}
    obj["metadata"]["managedFields"] = [entry]
    obj["spec"]["progressDeadlineSeconds"] = 600
    (container,) = obj["spec"]["template"]["spec"]["containers"]
    container["ports"][0]["protocol"] = "TCP"
    container["imagePullPolicy"] = "Always"
    container["resources"] = {"limits": {"cpu": "1", "memory": "1Gi", "aws.amazon.com/neuron": "6"}}
    del container["volumeMounts"]
    obj["status"] = {"replicas": 2}
    return obj


def container_of(obj: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = obj["spec"]["template"]["spec"]["containers"][0]
    return container


def owned_of(obj: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = obj["metadata"]["managedFields"][0]["fieldsV1"]
    return fields


def test_defaults_normalised_values_and_omitted_empty_values_do_not_differ() -> None:
    assert not needs_apply(DESIRED, live())


@pytest.mark.parametrize(
    "addition",
    [
        lambda o: o["metadata"]["labels"].update(other="x"),
        lambda o: o["metadata"].update(annotations={"other": "x"}),
        lambda o: container_of(o)["env"].insert(0, {"name": "INJECTED", "value": "x"}),
        lambda o: container_of(o)["env"].reverse(),
        lambda o: o["spec"]["template"]["spec"]["containers"].insert(0, {"name": "sidecar"}),
    ],
)
def test_fields_added_by_others_do_not_differ(addition: Edit) -> None:
    obj = live()
    addition(obj)
    assert not needs_apply(DESIRED, obj)


@pytest.mark.parametrize(
    "edit",
    [
        lambda o: o["spec"].update(replicas=3),
        lambda o: o["metadata"]["labels"].pop("a"),
        lambda o: container_of(o)["args"].append("--y"),
        lambda o: container_of(o)["args"].reverse(),
        lambda o: container_of(o)["env"].pop(),
        lambda o: container_of(o)["env"][1].update(value="3"),
        lambda o: container_of(o)["resources"]["limits"].update({"aws.amazon.com/neuron": "1"}),
        lambda o: container_of(o)["resources"]["limits"].update(memory="2Gi"),
        lambda o: o["spec"]["template"]["spec"].update(automountServiceAccountToken=True),
        lambda o: o["spec"]["template"]["spec"].pop("automountServiceAccountToken") or o["spec"].pop("replicas"),
        lambda o: o["spec"]["template"]["spec"].update(volumes=[]),
    ],
)
def test_a_missing_or_different_field_differs(edit: Edit) -> None:
    obj = live()
    edit(obj)
    assert needs_apply(DESIRED, obj)


def test_an_atomic_value_differs_even_when_it_contains_ours() -> None:
    """A selector is one value: a foreign key in addition to ours changes what it selects."""
    obj = live()
    obj["spec"]["selector"]["matchLabels"]["app"] = "other"
    del owned_of(obj)["f:spec"]["f:selector"]
    assert needs_apply(DESIRED, obj)


def test_an_applied_field_that_is_no_longer_wanted_differs() -> None:
    for removed in (lambda o: container_of(o)["env"].pop(), lambda o: o["spec"].pop("replicas")):
        desired = copy.deepcopy(DESIRED)
        removed(desired)
        assert needs_apply(desired, live())
        # After a create the same entry also holds the server's defaults and proves nothing.
        assert not needs_apply(desired, live("Update"))


@pytest.mark.parametrize("operation", ["Apply", "Update"])
def test_a_label_or_annotation_that_is_no_longer_wanted_differs(operation: str) -> None:
    """The API server has no defaults for them, so those of a create are ours, too."""
    desired = copy.deepcopy(DESIRED)
    desired["metadata"].pop("labels")
    assert needs_apply(desired, live(operation))


def test_ownership_of_set_members_is_tracked_one_by_one() -> None:
    desired = {"metadata": {"name": "x", "finalizers": ["ours"]}}
    owned = {"f:metadata": {"f:finalizers": {".": {}, 'v:"ours"': {}}}}
    entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": owned}
    metadata = {"name": "x", "finalizers": ["theirs", "ours"], "managedFields": [entry]}
    assert not needs_apply(desired, {"metadata": metadata})
    assert needs_apply(desired, {"metadata": {**metadata, "finalizers": ["theirs"]}})
    assert needs_apply({"metadata": {"name": "x", "finalizers": []}}, {"metadata": metadata})


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("500m", "0.5", True),
        ("1Gi", "1024Mi", True),
        ("1e3", "1k", True),
        (2, "2", True),
        ("1G", "1Gi", False),
        ("1", "1m", False),
        ("lots", "lots", True),
        ("lots", "more", False),
    ],
)
def test_quantities_compare_as_numbers(ours: Any, theirs: Any, same: bool) -> None:
    desired, obj = copy.deepcopy(DESIRED), live()
    container_of(desired)["resources"]["limits"]["cpu"] = ours
    container_of(obj)["resources"]["limits"]["cpu"] = theirs
    assert needs_apply(desired, obj) != same


def test_only_another_version_or_another_wish_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(containment, "needs_apply", lambda *both: compared.append(both) or needs_apply(*both))
    contained, obj = Contained(max_size=1), live()
    obj["metadata"].update(uid="u", resourceVersion="1")
    other = {**obj, "metadata": {**obj["metadata"], "resourceVersion": "2"}}
    scaled = {**DESIRED, "spec": {**DESIRED["spec"], "replicas": 3}}
    for wish, found, num_compared in [
        (DESIRED, obj, 1),
        (DESIRED, obj, 1),
        (scaled, obj, 2),
        (scaled, obj, 3),  # what is not contained is not remembered
        (DESIRED, obj, 3),
        (DESIRED, other, 4),
        (DESIRED, {**obj, "metadata": {**obj["metadata"], "uid": "v"}}, 5),
        (DESIRED, other, 6),  # the oldest was forgotten
    ]:
        assert contained.needs_apply(wish, found) == (wish is scaled)
        assert len(compared) == num_compared
