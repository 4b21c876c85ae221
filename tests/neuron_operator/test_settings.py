"""Settings of `neuron-operator run`: their sources, and refusals by name."""

from __future__ import annotations

import pytest

from neuron_operator.read.world import EngineSettings, JobSettings
from neuron_operator.run import settings
from neuron_operator.run.settings import SETTINGS, InvalidSetting, load

IMAGE = ["--runtime-image", "example.com/runtime:1"]


def test_a_flag_overrides_its_variable_and_the_variable_the_default() -> None:
    environ = {"NEURON_OPERATOR_NUM_WORKERS": "3", "NEURON_OPERATOR_LEASE_NAME": "ours"}
    loaded = load([*IMAGE, "--num-workers", "5"], environ)
    assert (loaded.num_workers, loaded.lease_name, loaded.http_port) == (5, "ours", 8080)


def test_the_lease_is_renewed_each_third_of_its_duration_and_given_up_after_two() -> None:
    lease = load(IMAGE, {}).lease
    assert (lease.duration_seconds, lease.renew_seconds, lease.deadline_seconds) == (12, 4.0, 8.0)


def test_structured_settings_are_json_with_the_names_of_the_chart() -> None:
    jobs = '{"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}], "env": [{"name": "N", "value": "v"}]}'
    peers = '[{"podSelector": {}}]'
    loaded = load([*IMAGE, "--jobs", jobs, "--network-policy-ingress-from", peers, "--image-pull-secrets", "a, b"], {})
    assert loaded.models.jobs == JobSettings({"a": "b"}, ({"key": "k"},), {}, ({"name": "N", "value": "v"},))
    assert loaded.models.network_policy_ingress_from == ({"podSelector": {}},)
    assert loaded.models.image_pull_secrets == ("a", "b")


def test_the_default_engines_are_given_beside_the_images_of_engines() -> None:
    engines = '{"vllm": {"image": "v:1", "version": "0.29"}, "defaults": {"trn2": "vllm", "inf2": "optimum"}}'
    models = load([*IMAGE, "--engines", engines], {}).models
    assert models.engines == {"vllm": EngineSettings("v:1", "0.29")}
    assert models.engine_defaults == {"trn2": "vllm", "inf2": "optimum"}


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], {}, "--runtime-image"),
        ([], {"NEURON_OPERATOR_RUNTIME_IMAGE": " "}, "--runtime-image"),
        ([*IMAGE, "--num-workers", "0"], {}, "--num-workers is '0': must be a whole number from 1 to 256"),
        ([*IMAGE, "--http-port", "x"], {}, "--http-port"),
        (IMAGE, {"NEURON_OPERATOR_HTTP_PORT": "99999"}, r"\$NEURON_OPERATOR_HTTP_PORT is '99999'"),
        (IMAGE, {"NEURON_OPERATOR_JOBS": '{"nodeSelektor": {}}'}, "nodeSelektor"),
        (IMAGE, {"NEURON_OPERATOR_JOBS": "{"}, r"\$NEURON_OPERATOR_JOBS"),
        (IMAGE, {"NEURON_OPERATOR_NETWORK_POLICY_INGRESS_FROM": "{}"}, r"\$NEURON_OPERATOR_NETWORK_POLICY"),
        ([*IMAGE, "--image-pull-policy", "Often"], {}, "--image-pull-policy"),
        ([*IMAGE, "--device-mode", "PluginWithExtension"], {}, "--device-scheduler-name"),
        ([*IMAGE, "--device-scheduler-name", "s"], {}, "set both or neither"),
        ([*IMAGE, "--engines", '{"defaults": {"trn9": "nxdi"}}'], {}, r"defaults\.trn9: is no family of dev"),
        ([*IMAGE, "--engines", '{"defaults": {"trn2": "vlm"}}'], {}, r"defaults\.trn2: vlm is no engine; known"),
        (
            IMAGE,
            {"NEURON_OPERATOR_ENGINES": '{"defaults": {"trn3": "optimum"}}'},
            r"defaults\.trn3: optimum does not run on trn3; nxdi, vllm do",
        ),
        ([*IMAGE, "--engines", '{"defaults": {"inf2": "torch"}}'], {}, "torch does not run on inf2; nxdi, optimum"),
        (
            [*IMAGE, "--engines", '{"vllm-cpu": {"image": "i"}, "defaults": {"trn2": "vllm"}}'],
            {},
            r"defaults\.trn2: vllm has no image: set vllm\.image",
        ),
        (
            [*IMAGE, "--engines", '{"vllm": {"image": "i"}, "defaults": {"inf2": "vllm"}}'],
            {},
            "vllm does not run on inf2; nxdi, optimum",
        ),
        ([*IMAGE, "--engines", '{"defaults": "vllm"}'], {}, "defaults"),
        ([*IMAGE, "--engines", '{"vllm": {"imge": "i"}}'], {}, "imge"),
    ],
)
def test_an_unusable_value_is_refused_by_name(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        load(argv, environ)


def test_the_help_lists_every_setting_with_its_variable() -> None:
    text = settings.parser().format_help()
    for setting in SETTINGS:
        assert setting.flag in text
        assert setting.variable in text.replace("\n", "").replace(" ", "")


def test_no_variable_name_collides_with_kubernetes_service_variables() -> None:
    """A Service `neuron-operator` sets variables NEURON_OPERATOR_SERVICE_... and NEURON_OPERATOR_PORT... in pods."""
    made = ("NEURON_OPERATOR_SERVICE_", "NEURON_OPERATOR_PORT")
    assert not [setting.variable for setting in SETTINGS if setting.variable.startswith(made)]
