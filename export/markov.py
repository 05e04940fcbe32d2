"""The graphs ``markov_step`` and ``markov_loop``: the sequential head (equations 5 to 7), all in fp32."""

from __future__ import annotations

import numpy as np
from onnx import helper

from dspark.drafter.config import DrafterConfig
from dspark.drafter.tensors import DRAFT_TO_TARGET

from .builder import GraphBuilder, value_infos
from .contract import GraphSpec, TensorSpec
from .sampling import draw


def add_markov_step(config: DrafterConfig, spec: GraphSpec, builder: GraphBuilder) -> None:
    """Fill ``builder`` with one slot of the head."""
    head = MarkovHead(config, builder, spec.batch)
    logits, state = head.logits("previous", "base_logits", "hidden", "state")
    token, q = head.draw(logits, "noise", "temperature")
    builder.output(token, "token")
    builder.output(q, "q")
    if config.confidence_head:
        confidence = head.confidence("previous", "hidden", spec.batch)
        builder.output(builder.reshape(confidence, spec.batch), "confidence_logit")
    if config.markov_head_type == "rnn":
        builder.output(state, "next_state")


def add_markov_loop(config: DrafterConfig, spec: GraphSpec, builder: GraphBuilder, unrolled: bool) -> None:
    """Fill ``builder`` with K slots, as one ONNX Loop or unrolled."""
    b, batch, proposals = builder, spec.batch, config.proposals
    tokens, q = (_unrolled if unrolled else _loop)(config, spec, builder)  # [B, K], [B, K, V']
    if config.confidence_head:
        # Everything that a confidence needs is known once the tokens are, so it is one product after the loop.
        anchor = b.reshape("anchor", batch, 1)
        previous = b.op("Concat", anchor, b.slice(tokens, 1, 0, proposals - 1), axis=1) if proposals > 1 else anchor
        flat = b.reshape(previous, batch * proposals)
        hidden = b.reshape("hidden", batch * proposals, config.hidden_size)
        logits = MarkovHead(config, b, batch).confidence(flat, hidden, batch * proposals)
        logits = b.reshape(logits, batch, proposals)
        b.output(logits, "confidence_logits")
        # TensorRT has no CumProd: exp(Σ log σ(x)), with log σ(x) = −softplus(−x)
        log_survival = b.op("CumSum", b.op("Neg", b.op("Softplus", b.op("Neg", logits))), b.constant(1))
        b.output(b.op("Exp", log_survival), "survival")
    b.output(tokens, "tokens")
    b.output(q, "q")


class MarkovHead:
    """Nodes of the head for ``batch`` rows."""

    def __init__(self, config: DrafterConfig, builder: GraphBuilder, batch: int) -> None:
        self.config, self.b, self.batch = config, builder, batch

    def logits(self, previous: str, base_logits: str, hidden: str, state: str) -> tuple[str, str]:
        """previous [B], base_logits [B, V'], hidden [B, h], state [B, r] -> logits [B, V'], next state."""
        b, kind, rank = self.b, self.config.markov_head_type, self.config.markov_rank
        if kind == "none":
            return base_logits, state
        e = self._row(previous)  # [B, r]
        if kind == "gated":
            gate = self._linear(b.op("Concat", hidden, e, axis=1), "markov_head.gate_proj")
            e = b.op("Mul", b.op("Sigmoid", gate), e)
        if kind == "rnn":
            z = self._linear(b.op("Concat", state, e, hidden, axis=1), "markov_head.joint_proj")
            update, candidate, output = b.split(z, 1, [rank] * 3)
            update = b.op("Sigmoid", update)
            keep = b.op("Sub", b.constant(1, np.float32), update)
            state = b.op("Add", b.op("Mul", update, state), b.op("Mul", keep, b.op("Tanh", candidate)))
            e = b.op("Tanh", output)
        return b.op("Gemm", e, b.weight("markov_head.markov_w2.weight"), base_logits, transB=1), state

    def draw(self, logits: str, noise: str, temperature: str) -> tuple[str, str]:
        """logits [B, V'] -> token [B] as a target id, and q [B, V'], the law that it was drawn from."""
        token, q = draw(self.b, logits, noise, temperature, self.batch, self.config.proposal_vocab_size)
        if self.config.reduced_vocabulary:
            token = self.b.op("Gather", self.b.weight(DRAFT_TO_TARGET), token)
        return token, q

    def confidence(self, previous: str, hidden: str, rows: int) -> str:
        """previous [rows], hidden [rows, h] -> logits [rows, 1]."""
        b = self.b
        if self.config.confidence_head_with_markov:
            hidden = b.op("Concat", hidden, self._row(previous), axis=1)
        return self._linear(hidden, "confidence_head.proj")

    def _row(self, previous: str) -> str:
        return self.b.op("Gather", self.b.weight("markov_head.markov_w1.weight"), previous)

    def _linear(self, x: str, name: str) -> str:
        return self.b.op("Gemm", x, self.b.weight(f"{name}.weight"), self.b.weight(f"{name}.bias"), transB=1)


def _unrolled(config: DrafterConfig, spec: GraphSpec, b: GraphBuilder) -> tuple[str, str]:
    head = MarkovHead(config, b, spec.batch)
    previous, state = "anchor", _zero_state(config, spec, b) if config.markov_head_type == "rnn" else ""
    tokens, laws = [], []
    for slot in range(config.proposals):
        base, hidden, noise = (
            b.op("Gather", name, b.constant(slot), axis=1) for name in ("base_logits", "hidden", "noise")
        )
        logits, state = head.logits(previous, base, hidden, state)
        previous, q = head.draw(logits, noise, "temperature")
        tokens.append(b.unsqueeze(previous, 1))
        laws.append(b.unsqueeze(q, 1))
    return b.op("Concat", *tokens, axis=1), b.op("Concat", *laws, axis=1)


def _loop(config: DrafterConfig, spec: GraphSpec, b: GraphBuilder) -> tuple[str, str]:
    body, batch = b.body(), spec.batch
    slot, condition, previous, state = "slot", "keep_going", "previous", "state"
    base, hidden, noise = (body.op("Gather", name, slot, axis=1) for name in ("base_logits", "hidden", "noise"))
    head = MarkovHead(config, body, batch)
    logits, next_state = head.logits(previous, base, hidden, state)
    token, q = head.draw(logits, noise, "temperature")
    # A condition passed through fails in TensorRT where none is given; a constant true does not.
    always = body.op("Identity", b.constant(True, np.bool_))

    rnn = config.markov_head_type == "rnn"
    carried = [TensorSpec(previous, "int64", (batch,))]
    if rnn:
        carried.append(TensorSpec(state, "float32", (batch, config.markov_rank)))
    scalars = [TensorSpec(slot, "int64", ()), TensorSpec(condition, "bool", ())]
    results = [
        TensorSpec(always, "bool", ()),
        TensorSpec(token, "int64", (batch,)),
        *([TensorSpec(next_state, "float32", (batch, config.markov_rank))] if rnn else []),
        TensorSpec(body.op("Identity", token), "int64", (batch,)),
        TensorSpec(q, "float32", (batch, config.proposal_vocab_size)),
    ]
    graph = helper.make_graph(body.nodes, "markov_slot", value_infos([*scalars, *carried]), value_infos(results))
    initial = ["anchor", *([_zero_state(config, spec, b)] if rnn else [])]
    *_, tokens, laws = b.ops(
        "Loop",
        b.constant(config.proposals),
        b.constant(True, np.bool_),
        *initial,
        outputs=len(initial) + 2,
        body=graph,
    )
    return b.transpose(tokens, 1, 0), b.transpose(laws, 1, 0, 2)  # stacked over slots: [K, B], [K, B, V']


def _zero_state(config: DrafterConfig, spec: GraphSpec, b: GraphBuilder) -> str:
    return b.constant(np.zeros((spec.batch, config.markov_rank)), np.float32)
