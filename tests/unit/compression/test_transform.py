"""The transform codec: its rate, what the rotation gains, and what both ends know of each other."""

from __future__ import annotations

import struct
from statistics import mean, median

import pytest
import torch
from torch import Tensor

from atoll.compression.basis import Basis, Covariance, mean_basis_bytes, most_basis_bytes
from atoll.compression.codec import relative_error
from atoll.compression.context import CodecContext, Direction
from atoll.compression.registry import MessageCoder, codec
from atoll.compression.transform import SMALLEST, TransformCodec
from atoll.protocol.errors import MissingState, WireError
from atoll.protocol.ids import MicrobatchIndex
from atoll.protocol.messages import Message
from support.messages import key_of

BITS = {
    "transform": 2.0,
    "transform-1.75": 1.75,
    "transform-1.5": 1.5,
    "transform-1": 1.0,
    "transform-0.7": 0.7,
    "transform-0.5": 0.5,
}
HEADER, PIECE = struct.Struct("<BIf"), struct.Struct("<IHIII")
CARRIES_A_PIECE = 8


def correlated(index: int, rows: int = 1024, width: int = 64, decay: float = 0.1) -> Tensor:
    """Rows whose variances fall by the same factor from one direction to the next, the directions being the same each time."""
    turned = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(99)))[0]
    normal = torch.randn(rows, width, generator=torch.Generator().manual_seed(index))
    scaled: Tensor = (normal * torch.exp(-decay * torch.arange(width))) @ turned
    return scaled


def context(index: int, direction: Direction = Direction.FORWARD) -> CodecContext:
    return CodecContext(edge="3:0", microbatch=MicrobatchIndex(index), direction=direction)


def version_of(data: bytes) -> int:
    """Of the basis that a message needs."""
    return int(HEADER.unpack_from(data)[1])


def piece_bytes(data: bytes) -> int:
    """What a message without a mask carries of a basis."""
    if not data[0] & CARRIES_A_PIECE:
        return 0
    return PIECE.size + int(PIECE.unpack_from(data, HEADER.size)[3])


class Wire:
    """Two ends of a link that carries one edge in one direction."""

    def __init__(self, name: str = "transform", direction: Direction = Direction.FORWARD) -> None:
        self.sender, self.receiver = codec(name), codec(name)
        self._direction = direction

    def encode(self, tensor: Tensor, index: int) -> bytes:
        data = self.sender.encode(tensor, context(index, self._direction))
        assert data is not None
        assert memoryview(data).nbytes <= self.sender.num_bytes(tuple(tensor.shape), tensor.dtype)
        return bytes(data)

    def decode(self, data: bytes, like: Tensor, index: int) -> Tensor:
        return self.receiver.decode(data, like.dtype, tuple(like.shape), context(index, self._direction))

    def send(self, tensor: Tensor, index: int) -> tuple[Tensor, int]:
        """What arrives, and the bytes that it took."""
        data = self.encode(tensor, index)
        return self.decode(data, tensor, index), len(data)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize(
    ("direction", "decay"),
    [(Direction.FORWARD, 0.2), (Direction.FORWARD, 0.4), (Direction.BACKWARD, 0.1), (Direction.BACKWARD, 0.3)],
)
def test_the_rate_is_what_was_asked_for(name: str, direction: Direction, decay: float) -> None:
    wire, counts = Wire(name, direction), []
    for index in range(12):
        tensor = correlated(index, decay=decay) * 3.0**index  # scales change from message to message
        data = wire.encode(tensor, index)
        wire.decode(data, tensor, index)
        counts.append(8 * (len(data) - piece_bytes(data)) / tensor.numel())
    assert all(0.75 * BITS[name] < bits < 1.3 * BITS[name] for bits in counts)
    assert mean(counts[4:]) == pytest.approx(BITS[name], rel=0.06)


@pytest.mark.parametrize("direction", Direction)
def test_it_loses_far_less_than_as_many_bits_in_blocks(direction: Direction) -> None:
    """Two bits against two and a quarter and against four and a quarter, in the mean over messages."""
    lost = {"transform": 0.0, "int2": 0.0, "int4": 0.0}
    for name in lost:
        wire = Wire(name, direction)
        for index in range(8):
            tensor = correlated(index)
            lost[name] += relative_error(tensor, wire.send(tensor, index)[0]) ** 2 / 8
    if direction is Direction.FORWARD:
        assert lost["transform"] < 0.05 * lost["int2"]
        assert lost["transform"] < lost["int4"]
    else:
        assert lost["transform"] < 0.08 * lost["int2"]
        assert lost["transform"] < 2.0 * lost["int4"]


def test_activations_without_common_directions_take_more_bits_rather_than_lose_them() -> None:
    """As those of new weights: one percent is what they may lose. Gradients keep to their bits."""
    found = {}
    for direction in Direction:
        wire = Wire(direction=direction)
        for index in range(6):
            tensor = correlated(index, decay=0.0)
            data = wire.encode(tensor, index)
            back, size = wire.decode(data, tensor, index), len(data) - piece_bytes(data)
            found[direction] = relative_error(tensor, back) ** 2, 8 * size / tensor.numel()
        if direction is Direction.FORWARD:
            assert correlated_bits(wire, 6) == pytest.approx(2.0, rel=0.3)
    assert found[Direction.FORWARD][0] == pytest.approx(0.01, rel=0.25)
    assert 3.4 < found[Direction.FORWARD][1] < 4.0
    assert 0.1 < found[Direction.BACKWARD][0] < 0.2
    assert found[Direction.BACKWARD][1] == pytest.approx(2.0, rel=0.1)


def correlated_bits(wire: Wire, first: int) -> float:
    """Of the last of some tensors that do have common directions, and follow others."""
    sizes = [wire.send(correlated(index), index)[1] for index in range(first, first + 24)]
    return 8 * sizes[-1] / (1024 * 64)


def test_gradients_are_rounded_without_bias_and_activations_to_the_nearest() -> None:
    tensor = correlated(0, rows=64)
    means = {}
    for direction in Direction:
        total = torch.zeros_like(tensor)
        squared = 0.0
        wire = Wire("transform-1.5", direction)
        for index in range(200):
            error = wire.send(tensor, index)[0] - tensor
            total += error
            squared += float(error.square().mean())
        means[direction] = float((total / 200).square().mean()) / (squared / 200)
    assert means[Direction.BACKWARD] < 1.5 / 200
    assert means[Direction.FORWARD] > 0.5


def test_the_same_tensors_give_the_same_bytes_and_the_ends_agree() -> None:
    first, second = Wire(), Wire()
    for index in range(5):
        tensor = correlated(index)
        data = first.encode(tensor, index)
        assert data == second.encode(tensor.clone(), index)
        back = first.decode(data, tensor, index)
        assert torch.equal(back, second.decode(data, tensor, index))
        assert torch.equal(back, first.sender.decode(data, tensor.dtype, tuple(tensor.shape), context(index)))


def test_bases_come_in_pieces_and_no_message_is_much_longer_than_others() -> None:
    wire, rows, width = Wire("transform-1"), 256, 128
    messages = [wire.encode(correlated(index, rows, width), index) for index in range(120)]
    assert piece_bytes(messages[0]) > width * width // 4  # all of the first
    sizes = [len(message) for message in messages]
    assert max(sizes[1:]) < 1.7 * median(sizes)
    assert max(sizes[40:]) < 1.35 * median(sizes)
    versions = [version_of(message) for message in messages]
    assert versions == sorted(versions)
    assert versions[0] == 1
    assert versions[20] >= 3
    assert versions[-1] >= 6
    shipped = sum(piece_bytes(message) for message in messages[60:])
    assert shipped <= 0.08 * sum(sizes[60:])
    assert mean(sizes[60:]) == pytest.approx(wire.sender.mean_bytes((rows, width), torch.float32), rel=0.06)


def test_a_basis_of_few_columns_costs_little_and_comes_as_often_as_it_is_worth() -> None:
    wire, rows, width = Wire(), 512, 32
    messages = [wire.encode(correlated(index, rows, width, decay=0.2), index) for index in range(60)]
    assert version_of(messages[-1]) <= 12
    estimate = wire.sender.mean_bytes((rows, width), torch.float32)
    assert mean(len(message) for message in messages[20:]) == pytest.approx(estimate, rel=0.06)


def test_another_rung_goes_on_with_the_bases_that_are_there() -> None:
    left, right = MessageCoder(), MessageCoder()
    lost = {}
    for index in range(10):
        name = "transform-0.7" if index == 8 else "transform-1.5" if index == 9 else "transform"
        message = Message(key=key_of(microbatch=index), tensors=(("0:0", correlated(index)),))
        encoded = left.encode(message, name)
        data = bytes(encoded.tensors[0].data)
        if index >= 8:
            assert version_of(data) >= 3
            assert 8 * (len(data) - piece_bytes(data)) / (1024 * 64) == pytest.approx(BITS[name], rel=0.3)
        lost[name] = relative_error(message.tensors[0][1], right.decode(encoded).tensors[0][1]) ** 2
    assert lost["transform"] < lost["transform-1.5"] < lost["transform-0.7"] < 0.5


def test_a_basis_follows_the_tensors() -> None:
    """The directions change; the first basis would lose as much as none."""
    wire = Wire("transform-1.5", Direction.BACKWARD)
    lost = []
    for index in range(45):
        tensor = correlated(index) if index < 2 else correlated(index).roll(7, dims=1).flip(1)
        lost.append(relative_error(tensor, wire.send(tensor, index)[0]) ** 2)
    assert lost[44] < 1.5 * lost[1]
    assert lost[44] < 0.5 * lost[3]


def test_without_its_basis_a_message_is_refused_until_the_basis_comes() -> None:
    wire = Wire()
    tensors = [correlated(index) for index in range(3)]
    first, second, third = (wire.encode(tensor, index) for index, tensor in enumerate(tensors))
    assert [version_of(data) for data in (first, second, third)] == [1, 1, 2]
    with pytest.raises(MissingState, match="basis 1 of 64 columns is not here"):
        wire.decode(second, tensors[1], 1)
    wire.decode(first, tensors[0], 0)
    wire.decode(first, tensors[0], 0)  # sent again
    for index, data in ((1, second), (2, third), (1, second), (0, first)):
        assert relative_error(tensors[index], wire.decode(data, tensors[index], index)) < 0.1


def test_a_message_that_overtook_a_piece_is_decoded_after_it() -> None:
    wire = Wire("transform-1")
    tensors = [correlated(index, 256, 128) for index in range(12)]
    messages = [wire.encode(tensor, index) for index, tensor in enumerate(tensors)]
    second = next(index for index, data in enumerate(messages) if version_of(data) == 2)
    assert second > 2
    assert piece_bytes(messages[2])
    held = [index for index in range(len(messages)) if index != 2]
    for index in held[: held.index(second)]:
        wire.decode(messages[index], tensors[index], index)
    with pytest.raises(MissingState, match="basis 2 of 128 columns"):
        wire.decode(messages[second], tensors[second], second)
    for index in (2, second):
        assert relative_error(tensors[index], wire.decode(messages[index], tensors[index], index)) < 0.5


def test_channels_of_images_with_few_places_are_the_columns() -> None:
    """Also where memory has them last; of other images the last dimension is, as of any tensor."""
    lost, sizes = {}, {}
    for name in ("channels second", "channels last", "few channels"):
        left, right = MessageCoder(), MessageCoder()
        for index in range(4):
            image = correlated(index, 16 * 64).view(16, 8, 8, 64).movedim(3, 1)
            if name == "channels second":
                image = image.contiguous()
            elif name == "few channels":
                image = image.reshape(16, 2, 32, 64)
            encoded = left.encode(Message(key=key_of(microbatch=index), tensors=(("0:0", image),)), "transform")
            back = right.decode(encoded).tensors[0][1]
            assert (back.shape, back.stride()) == (image.shape, image.stride())
            lost[name], sizes[name] = relative_error(image, back) ** 2, encoded.num_bytes
    assert lost["channels second"] == pytest.approx(lost["channels last"], rel=1e-3)
    assert lost["channels second"] < lost["few channels"]
    assert sizes["channels second"] == sizes["channels last"] < 0.8 * sizes["few channels"]


def test_a_reset_of_both_ends_begins_anew_and_of_one_end_is_noticed() -> None:
    wire = Wire()
    tensor = correlated(0)
    first = wire.encode(tensor, 0)
    wire.decode(first, tensor, 0)
    later = wire.encode(tensor, 1)
    wire.sender.reset()
    wire.receiver.reset()
    with pytest.raises(MissingState):
        wire.decode(later, tensor, 1)
    assert wire.encode(tensor, 0) == first
    assert relative_error(tensor, wire.decode(first, tensor, 0)) < 0.1


def test_edges_and_links_know_nothing_of_each_other() -> None:
    def message(index: int, edge: str, decay: float) -> Message:
        return Message(key=key_of(microbatch=index), tensors=((edge, correlated(index, decay=decay)),))

    left, right, alone = MessageCoder(), MessageCoder(), MessageCoder()
    for index in range(4):
        one = left.encode(message(index, "0:0", 0.1), "transform")
        other = left.encode(message(index, "1:0", 0.3), "transform")
        assert bytes(one.tensors[0].data) == bytes(alone.encode(message(index, "0:0", 0.1), "transform").tensors[0].data)
        for encoded, decay in ((other, 0.3), (one, 0.1)):
            sent, back = message(index, encoded.tensors[0].name, decay), right.decode(encoded).tensors[0][1]
            [(_, _, own)] = left.lossy(sent, encoded)
            assert torch.equal(own, back)
            assert relative_error(sent.tensors[0][1], back) < 0.1


@pytest.mark.parametrize(("rows", "width"), [(64, 16), (40, 700), (600, 1100), (2000, 1), (1, 2000), (33, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_widths_and_types(rows: int, width: int, dtype: torch.dtype) -> None:
    wire, generator = Wire(), torch.Generator().manual_seed(0)
    for index in range(3):
        tensor = torch.randn(rows, 1, generator=generator).mul(torch.linspace(0.5, 2.0, width)).to(dtype)
        back, _ = wire.send(tensor, index)
        assert back.dtype == dtype
        assert relative_error(tensor, back) < 0.4


def test_a_basis_of_many_blocks_arrives_as_it_was() -> None:
    covariance = Covariance(700)
    covariance.add(torch.randn(900, 700, generator=torch.Generator().manual_seed(0)).cumsum(1), 26.0)
    basis = covariance.basis(3, 300, 0.1)
    assert basis is not None
    rows = torch.randn(5, 700, generator=torch.Generator().manual_seed(1))
    copy = Basis.from_bytes(memoryview(basis.to_bytes()), 3, 700, 300)
    assert relative_error(rows, copy.synthesise(basis.analyse(rows))) < 0.01  # some processors multiply in half precision
    assert torch.equal(copy.synthesise(rows.t()), basis.synthesise(rows.t()))
    assert len(basis.to_bytes()) < most_basis_bytes(700, 300)


def test_the_directions_of_strong_components_are_rounded_finely_and_cost_few_bits() -> None:
    """A leak of an eighth of a step, from all others together, is what any component gets."""
    covariance, step = Covariance(64), 0.1
    sample = torch.cat([correlated(index) for index in range(8)])
    size = float(sample.square().mean().sqrt())
    covariance.add(sample, size)
    basis = covariance.basis(1, 64, step)
    assert basis is not None
    assert len(basis.to_bytes()) < 1.3 * mean_basis_bytes(64, 64)
    components = basis.analyse(sample / size)
    crossed = components @ components.t() / len(sample)
    leaked = (crossed - torch.diag(crossed.diagonal())).abs()
    weak = crossed.diagonal() < step**2
    assert int(weak.sum()) > 10
    assert float(crossed.diagonal()[-5:].mean().sqrt()) < 0.3 * step
    assert float(leaked[weak][:, weak].amax()) < step**2


def test_rows_of_zeros_cost_nothing_and_stay_zeros() -> None:
    wire, tensor = Wire(direction=Direction.BACKWARD), correlated(0)
    tensor[::3] = 0.0
    back, _ = wire.send(tensor, 0)
    assert torch.equal((back != 0).any(1), (tensor != 0).any(1))
    assert relative_error(tensor, back) < 0.16
    back, size = wire.send(torch.zeros(1024, 64), 1)
    assert (size, bool(back.any())) == (HEADER.size, False)


def test_what_changes_abruptly_is_within_the_bounds_at_once() -> None:
    wire = Wire()
    for index in range(10):
        tensor = correlated(index, decay=0.5 if index % 2 else 0.01)
        back, size = wire.send(tensor, index)
        assert 8 * size / tensor.numel() < 5.0 + (10.0 if index == 0 else 0.2)
        assert relative_error(tensor, back) < 0.5


def test_small_tensors_travel_as_integers_and_do_not_disturb_the_state() -> None:
    wire, small = Wire(), torch.randn(SMALLEST - 1, generator=torch.Generator().manual_seed(0))
    first = wire.encode(correlated(0), 0)
    assert relative_error(small, wire.decode(wire.encode(small, 1), small, 1)) < 0.01
    wire.decode(first, correlated(0), 0)
    assert relative_error(correlated(2), wire.send(correlated(2), 2)[0]) < 0.1


def test_bytes_that_no_encoder_made_are_refused() -> None:
    wire, tensor = Wire(), correlated(0)
    data = wire.encode(tensor, 0)
    first = HEADER.size
    for wrong, reason in (
        (data[:5], "never encodes"),
        (data[: first + 10], "10 bytes cannot hold a piece"),
        (data[: first + PIECE.size + 10], "has no bytes"),
        (bytes([3]) + data[1:], "never encodes with flags 3"),
        (data[: first + 4] + bytes([65, 0]) + data[first + 6 :], "cannot have 65"),
        (data[:5] + bytes(4) + data[first:], "step 0.0"),
        (bytes([4]) + data[1:first], "a mask of 1024 rows"),
        (bytes([4]) + data[1:first] + bytes(500), "a mask of no rows"),
    ):
        with pytest.raises(WireError, match=reason):
            TransformCodec("transform", bits=2.0, most_error=0.01).decode(wrong, tensor.dtype, tuple(tensor.shape), context(0))


def test_pieces_that_do_not_belong_together_are_refused() -> None:
    wire, tensor = Wire("transform-1"), correlated(0, 256, 128)
    messages = [wire.encode(correlated(index, 256, 128), index) for index in range(3)]
    wire.decode(messages[0], tensor, 0)
    wire.decode(messages[1], tensor, 1)
    place = HEADER.size + PIECE.size - 4
    [total] = struct.unpack_from("<I", messages[2], place)
    wrong = messages[2][:place] + struct.pack("<I", total + 1) + messages[2][place + 4 :]
    with pytest.raises(WireError, match="do not belong together"):
        wire.decode(wrong, tensor, 2)
