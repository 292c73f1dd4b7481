"""The names of state, and the hash over it."""

from __future__ import annotations

import torch

from atoll.compression.registry import encode_message
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageHeader
from atoll.protocol.state import changing_names, grouped, moment_name, split_name, state_digest, state_judge
from support.hand_models import convolutional
from support.messages import key_of


def message(*tensors: tuple[str, torch.Tensor]) -> EncodedMessage:
    return encode_message(Message(key=key_of(Kind.STATE), tensors=tensors))


def header(*tensors: tuple[str, torch.Tensor]) -> MessageHeader:
    return message(*tensors).header()


def test_a_moment_belongs_to_its_parameter_and_an_odd_name_to_itself() -> None:
    assert split_name(moment_name("blocks.0.weight", "exp_avg")) == ("blocks.0.weight", "exp_avg")
    assert split_name("blocks.0.weight") == ("blocks.0.weight", None)
    assert split_name("odd@name") == ("odd@name", None)
    assert split_name("odd@name@step") == ("odd@name", "step")


def test_the_judge_takes_what_the_graph_and_the_optimizer_have() -> None:
    graph = convolutional().graph
    spec = graph.parameters[0]
    judge = state_judge(slice_graph(graph, ())[0], "adamw")
    right = torch.zeros(spec.shape)
    step, average = moment_name(spec.name, "step"), moment_name(spec.name, "exp_avg")
    assert judge(header((spec.name, right), (step, torch.tensor(3.0)), (average, right))) is None
    assert "is" in str(judge(header((step, right))))
    assert judge(header((average, torch.zeros(3)))) is not None
    assert judge(header((moment_name(spec.name, "momentum_buffer"), right))) is not None
    assert judge(header(("elsewhere", right))) is not None
    buffer = graph.buffers[0]
    assert judge(header((moment_name(buffer.name, "exp_avg"), torch.zeros(buffer.shape)))) is not None


def test_training_changes_weights_and_statistics() -> None:
    graph = convolutional().graph
    assert changing_names(graph) == {spec.name for spec in graph.parameters} | {
        spec.name for spec in graph.buffers if spec.mutated
    }


def test_the_digest_tells_bytes_names_shapes_and_order_apart() -> None:
    values = torch.arange(6.0)
    one, two = ("a", values), ("b", values)
    assert state_digest(message(one, two)) == state_digest(message(("a", values.clone()), two))
    different = [
        state_digest(message(one, two)),
        state_digest(message(two, one)),
        state_digest(message(one)),
        state_digest(message(("a", values + 1), two)),
        state_digest(message(("a", values.reshape(2, 3)), two)),
        state_digest(message(("a", values.view(torch.int32)), two)),
    ]
    assert len(set(different)) == len(different)


def test_what_a_name_stands_for_is_in_the_same_order_wherever_it_comes_from() -> None:
    names = ["b@step", "a", "b@exp_avg", "a@exp_avg_sq", "b", "a@exp_avg"]
    for order in (names, names[::-1], sorted(names)):
        groups = grouped({name: torch.zeros(1) for name in order})
        assert {owner: [name for name, _ in group] for owner, group in groups.items()} == {
            "a": ["a", "a@exp_avg", "a@exp_avg_sq"],
            "b": ["b", "b@exp_avg", "b@step"],
        }
