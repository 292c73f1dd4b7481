"""Where a model turns autocast off, a stage in bf16 computes in full precision, as the model itself does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.coordinator.tracing.slicing import slice_graph
from atoll.peer.stage.stage import StageSettings
from atoll.protocol.assignment import OptimizerSettings
from support.graphs import traced
from support.pipelines import HandPipeline, Sample


class Careful(nn.Module):
    """Two products: one under the run's precision, one always in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        with torch.autocast(features.device.type, enabled=False):
            hidden = self.second(hidden.float())
        loss: Tensor = hidden.square().mean()
        return loss


def test_a_region_without_autocast() -> None:
    graph = traced(Careful, {"features": torch.zeros(4, 16)})
    settings = StageSettings(run_seed=1, device=torch.device("cpu"), optimizer=OptimizerSettings(), precision="bf16")
    pipeline = HandPipeline(slice_graph(graph, ()), settings)
    module = Careful()
    module.load_state_dict(pipeline.state())
    features = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(features)
        rough = module.second(module.first(features)).square().mean()
    loss = pipeline.gradients(1, [Sample(inputs={"features": features})])
    assert loss == float(expected)
    assert loss != float(rough)
