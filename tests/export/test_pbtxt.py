"""`config.pbtxt` means to us what it means to protobuf."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from nemo_rl_like.export.pbtxt import PbtxtError, parse
from nemo_rl_like.export.triton import python_config, vllm_config
from nemo_rl_like.export.triton_layout import MODEL_FIELDS
from nemo_rl_like.spec.export import TritonPythonTarget, TritonVllmTarget

SAMPLE = """
# a comment
name: "a \\"quoted\\" name", backend: 'vllm';
max_batch_size: 0
model_transaction_policy { decoupled: True }
instance_group [ { count: 1 kind : KIND_MODEL gpus: [0, 1] } ]
input [
  { name: "text" "_input" data_type: TYPE_STRING dims: [ -1, 2 ] optional: true },
  { name: "b" data_type: TYPE_FP32 dims: 1 }
]
parameters: { key: "A" value: { string_value: "x # y" } }
parameters < key: "B" value < string_value: "1" > >
response_cache { enable: false }
"""


def as_protobuf(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_a_sample_is_read_as_protobuf_reads_it() -> None:
    ours, theirs = parse(SAMPLE.replace("True", "true")), as_protobuf(SAMPLE)
    assert ours["name"] == [theirs.name] and ours["backend"] == [theirs.backend]
    assert ours["instance_group"] == [
        {"count": [1], "kind": ["KIND_MODEL"], "gpus": list(theirs.instance_group[0].gpus)}
    ]
    assert [item["name"] for item in ours["input"]] == [[i.name] for i in theirs.input]
    assert [item["dims"] for item in ours["input"]] == [list(i.dims) for i in theirs.input]
    keys = {item["key"][0]: item["value"][0]["string_value"][0] for item in ours["parameters"]}
    assert keys == {key: value.string_value for key, value in theirs.parameters.items()}
    assert ours["response_cache"] == [{"enable": [False]}]


def test_what_is_written_is_a_model_configuration() -> None:
    target = TritonVllmTarget(model_name="sums", gpu_ids=(2, 0), tensor_parallel_size=2)
    vllm, python = as_protobuf(vllm_config(target)), as_protobuf(python_config(TritonPythonTarget(threads=3)))
    assert (vllm.name, vllm.backend, vllm.model_transaction_policy.decoupled) == ("sums", "vllm", True)
    assert vllm.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_MODEL
    assert vllm.parameters["GPU_DEVICE_IDS"].string_value == "2,0"
    assert {i.name: i.optional for i in python.input}["input_ids"] is True
    assert python.parameters["THREADS"].string_value == "3"


def test_the_known_fields_are_those_of_the_message() -> None:
    assert {field.name for field in model_config_pb2.ModelConfig.DESCRIPTOR.fields} == MODEL_FIELDS


@pytest.mark.parametrize(
    "text",
    ["name 1", "name: ", "name: {", "a { b: 1", "a: [1 2]", "a: [1", "}", ": 1", 'a: "x', "a: 1 %", "a: >", 'a: "\\q"'],
)
def test_what_protobuf_refuses_is_refused(text: str) -> None:
    with pytest.raises(PbtxtError):
        parse(text)
    with pytest.raises(text_format.ParseError):
        as_protobuf(text)
