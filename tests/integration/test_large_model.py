"""A model far larger than the memory it may use is built, traced, costed and sliced without its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch
from atoll.coordinator.models.huggingface import huggingface_source
from atoll.coordinator.tracing.rehearsal import rehearse
from atoll.coordinator.tracing.segments import segments_of
from atoll.coordinator.tracing.slicing import slice_graph
from atoll.coordinator.tracing.trace import trace

def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = resident()
model = huggingface_source(Path(sys.argv[1]), "causal-lm").build()
graph = trace(model, {name: torch.zeros(1, 512, dtype=torch.long) for name in ("tokens", "targets")})
rehearsal = rehearse(graph)
segments = segments_of(rehearsal, copies=3)
middle = segments.positions[len(segments.positions) // 2]
stages = slice_graph(graph, (middle,), rehearsal.differentiable)
print(json.dumps({
    "growth": resident() - before,
    "parameters": sum(spec.num_bytes // 4 for spec in graph.parameters),
    "replayed": all(spec.initialisation is not None for spec in (*graph.parameters, *graph.buffers)),
    "halves": [sum(spec.num_bytes for spec in stage.parameters) for stage in stages],
    "recomputed": len(stages[1].recomputed),
    "sent": [boundary.spec.sizes(dict(graph.example)) for boundary in stages[0].sends],
}))
"""
LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def test_a_llama_of_seven_billion_parameters(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_7B))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(config)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["parameters"] == 6_738_415_616
    assert told["growth"] < 1.5e9
    assert told["replayed"]
    assert min(told["halves"]) > 0.4 * sum(told["halves"])
    assert told["recomputed"] > 0
    assert told["sent"] == [[1, 512, 4096]]
