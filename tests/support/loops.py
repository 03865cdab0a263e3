"""Every objective once more, slowly: loops over samples and tokens, one scalar at a time, written from the papers."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch


def advantages(
    kind: str, rewards: list[float], groups: list[int], lengths: list[int], normalize="none", greedy=None, shift=0.0, tau=1.0
):
    """One number a sample."""
    values = []
    informative = sum(len({r for r, g in zip(rewards, groups, strict=True) if g == group}) > 1 for group in groups)
    for i, (r, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [j for j, g in enumerate(groups) if g == group]
        inside = [rewards[j] for j in members]
        others = [rewards[j] for j in members if j != i]
        if kind == "reward":
            value = r
        elif kind == "group":
            value = r - (statistics.fmean(inside) + shift) if others else 0.0
        elif kind == "leave_one_out":
            value = r - statistics.fmean(others) if others else 0.0
        elif kind == "length_weighted":
            total = sum(lengths[j] for j in members)
            value = r - sum(rewards[j] * lengths[j] for j in members) / max(total, 1)
        elif kind == "group_scaled":
            value = (r - statistics.fmean(inside)) * len(rewards) / max(informative, 1)
        elif kind == "nonzero_scaled":
            value = (r - statistics.fmean(inside)) * len(rewards) / max(sum(x != 0 for x in rewards), 1)
        elif kind == "log_mean_exp":
            value = r - tau * math.log(sum(math.exp(x / tau) for x in inside) / len(inside))
        elif kind == "step_log_mean_exp":
            value = r - tau * math.log(sum(math.exp(x / tau) for x in rewards) / len(rewards))
        elif kind == "step_mean":
            value = r - statistics.fmean(rewards)
        elif kind == "greedy_baseline":
            value = r - greedy[i]
        elif kind == "pass_at_k":
            best = max(inside)
            value = best - sorted(inside)[-2] if i == members[inside.index(best)] and len(inside) > 1 else 0.0
        compared = inside if normalize == "group" else rewards
        std = statistics.stdev(compared) if len(compared) > 1 else 0.0
        divisor = statistics.fmean(inside) if normalize == "mean" else std
        if normalize != "none" and divisor > 1e-6:
            value /= divisor + 1e-6
        values.append(value)
    return values


def gae(rewards: list[float], before: list[float], behind: float, gamma: float, lam: float):
    """(advantages, returns) of the tokens of one response, by the definition as a double sum."""
    values = [*before, behind]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    gains = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
    return gains, [a + v for a, v in zip(gains, before, strict=True)]


def kl(estimator: str, logp, ref):
    d = logp - ref
    plain = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1, "abs": abs(d)}
    if estimator.endswith("+"):
        half = d * d / 2
        return half - half.item() + plain[estimator[:-1]].item()
    return plain[estimator]


def token_weight(aggregate: str, sample: int, lengths: list[int], longest: int) -> float:
    n = len(lengths)
    return {
        "token-mean": 1 / sum(lengths),
        "seq-mean-token-mean": 1 / (n * max(lengths[sample], 1)),
        "seq-mean-token-sum": 1 / n,
        "constant-length": 1 / (n * longest),
    }[aggregate]


def log_ratios(level: str, now: list, old: list) -> list:
    ratios = [a - b for a, b in zip(now, old, strict=True)]
    if level == "token":
        return ratios
    mean = sum(ratios) / len(ratios)
    if level in ("turn", "sequence"):
        return [mean] * len(ratios)
    return [a - a.item() + mean.item() for a in now]


def clip(x, low, high):
    return x if low <= float(x) <= high else torch.tensor(float(low if float(x) < low else high), dtype=torch.float64)


def surrogate(chosen: Any, now: list, ratios: list, advantage: list[float], marked: list[bool]) -> list:
    """What each token of one response adds to the objective, from the log-ratios."""
    name = chosen.surrogate
    low = chosen.clip_low if chosen.clip_low is not None else {"cispo": 1.0, "gmpo": 0.4}.get(name, 0.2)
    high = chosen.clip_high if chosen.clip_high is not None else {"gmpo": 0.4}.get(name, 0.2)
    if name == "sppo":
        eta = 1.0 if chosen.eta is None else chosen.eta
        return [-((sum(ratios) - eta * sum(advantage) / len(advantage)) ** 2)] * len(now)
    if name == "gmpo":
        logs = []
        for d, a in zip(ratios, advantage, strict=True):
            if a >= 0:
                logs.append(clip(d, -math.inf, high) if a > 0 else d * 0)
            else:
                logs.append(clip(d, -low, math.inf))
        ratio = torch.exp(sum(logs) / len(logs))
        return [ratio * (sum(advantage) / len(advantage))] * len(now)
    gains = []
    for logp, d, a, mark in zip(now, ratios, advantage, marked, strict=True):
        rho = torch.exp(d)
        if name in ("ppo_clip", "clip_cov"):
            value = min(rho * a, clip(rho, 1 - low, 1 + high) * a, key=float)
            if chosen.dual_clip is not None and a < 0:
                bound = torch.tensor(chosen.dual_clip * a, dtype=torch.float64)
                value = max(value, bound, key=float)
            if name == "clip_cov" and mark:
                value = value * 0
        elif name == "kl_cov":
            value = rho * a - (1.0 if chosen.cov_kl_coef is None else chosen.cov_kl_coef) * abs(d) * mark
        elif name == "cispo":
            value = float(clip(rho, 1 - low, 1 + high)) * a * logp
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            value = 4 / tau * torch.sigmoid(tau * (rho - 1)) * a
        elif name == "log_likelihood":
            value = a * logp
        elif name == "opmd":
            value = a * logp / (1 + (1.0 if chosen.tau is None else chosen.tau))
        elif name == "topr":
            value = a * logp if a > 0 else min(float(rho), 1.0) * a * logp
        elif name == "dppo":
            p, q = math.exp(float(logp)), math.exp(float(logp) - float(d))
            far = p - q if p > q else q - p
            if chosen.divergence == "kl":
                far = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            gone = far > high and p > q if a > 0 else far > low and p < q
            cap = math.inf if chosen.ratio_cap is None else chosen.ratio_cap
            value = logp * 0 if gone else min(float(rho), cap) * a * logp
        elif name == "cpgd":
            limit = math.log(1 + high) if a > 0 else math.log(1 - low)
            is_beyond = float(d) > limit if a > 0 else float(d) < limit
            drift = min(float(rho) - 1, 2.0) * (chosen.drift_coef or 0.0)
            value = (limit * a if is_beyond else d * a) - drift * logp
        elif name == "rec":
            value = rec(chosen, logp, d, float(rho), a)
        gains.append(value)
    return gains


def rec(chosen: Any, logp, d, rho: float, a: float):
    """REINFORCE on one token, with the mask, weight and additions that are asked for."""
    mode = chosen.clip_mode or "one_sided"
    low, high = (0.2 if bound is None else bound for bound in (chosen.clip_low, chosen.clip_high))
    inside = 1 - low <= rho <= 1 + high
    if mode == "none":
        stays = True
    elif mode == "two_sided":
        stays = inside
    elif mode == "one_sided":
        stays = (a >= 0 and rho <= 1 + high) or (a <= 0 and rho >= 1 - low)
    else:
        far_low, far_high = (x if y is None else y for x, y in ((0.6, chosen.ring_low), (2.0, chosen.ring_high)))
        stays = inside or (a >= 0 and rho <= 1 - far_low) or (a <= 0 and rho >= 1 + far_high)
    weight = {"none": 1.0, "ratio": rho, "advantage": math.exp(a / (chosen.weight_temperature or 1.0))}
    value = weight[chosen.token_weight or "none"] * a * logp if stays else logp * 0
    return value + (chosen.likelihood_coef or 0.0) * logp - (chosen.proximal_coef or 0.0) * d * d


def correction(chosen: Any, gaps: list[float], marked: list[bool]) -> tuple[list[float], list[bool]]:
    """(weight, kept) of the tokens of one response from log trainer - log engine."""
    levels = {
        "token": [math.exp(g) for g in gaps],
        "turn": [math.exp(sum(gaps))] * len(gaps),
        "sequence": [math.exp(sum(gaps))] * len(gaps),
        "geometric": [math.exp(sum(gaps) / len(gaps))] * len(gaps),
    }
    weights, are_kept = [1.0] * len(gaps), [True] * len(gaps)
    if chosen.weight != "none":
        weights = []
        for w in levels[chosen.weight]:
            inside = chosen.low <= w <= chosen.high
            weights.append(w if inside else 0.0 if chosen.outside == "mask" else min(max(w, chosen.low), chosen.high))
    if chosen.reject != "none":
        are_kept = [chosen.reject_low <= w <= chosen.reject_high for w in levels[chosen.reject]]
    for name, bound in (chosen.reject_divergence or {}).items():
        if name == "second_moment":
            are_kept = [stays and not mark for stays, mark in zip(are_kept, marked, strict=True)]
            continue
        over, kind = name.split("_")
        values = [-g if kind == "drop" else g * g / 2 if kind == "k2" else math.exp(g) - 1 - g for g in gaps]
        if over != "token":
            reduced = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[over]
            values = [reduced] * len(values)
        are_kept = [stays and value <= bound for stays, value in zip(are_kept, values, strict=True)]
    return weights, are_kept


def beyond_second_moment(gaps: list[float], bound: float) -> list[bool]:
    """Which tokens go, one after the other from the farthest, until the mean square of the rest is below the bound."""
    left = sorted(range(len(gaps)), key=lambda t: -(gaps[t] ** 2))
    while len(left) > 1 and sum(gaps[t] ** 2 for t in left) / len(left) >= bound:
        left.pop(0)
    return [t not in left for t in range(len(gaps))]


def old_logprobs(whose: str, sample: dict[str, list]) -> list[float]:
    """Of each token of a sample; a token of s steps ago lies (s - 1) / s of the way from the engine's to now's, 0 if new."""
    if whose == "loglinear":
        ways = [(steps - 1) / steps if steps > 1 else 0.0 for steps in sample["steps"]]
        return [
            (1 - way) * float(engine) + way * float(now)
            for way, engine, now in zip(ways, sample["engine"], sample["now"], strict=True)
        ]
    return sample["engine" if whose == "engine" else "old"]


def loss(chosen: Any, samples: list[dict[str, list]], longest: int, micro_batches: list[list[int]] | None = None):
    """The loss of one update; a sample has lists now, old, ref, engine, advantage, entropy, marked, one entry a token."""
    lengths = [len(sample["now"]) for sample in samples]
    total = torch.zeros((), dtype=torch.float64)
    if chosen.surrogate == "dpo":
        beta = 0.1 if chosen.beta is None else chosen.beta
        smooth = chosen.label_smoothing or 0.0
        for pair in range(0, len(samples), 2):
            better, worse = (sum(samples[pair + i]["now"]) - sum(samples[pair + i]["ref"]) for i in range(2))
            margin = beta * (better - worse)
            value = (1 - smooth) * torch.log(torch.sigmoid(margin)) + smooth * torch.log(torch.sigmoid(-margin))
            total = total - value / (len(samples) // 2)
        return total
    for number, sample in enumerate(samples):
        if not lengths[number]:
            continue
        old = old_logprobs(chosen.rollout_correction.old_logprobs_from, sample)
        ratios = log_ratios(chosen.importance_sampling_level, sample["now"], old)
        gains = surrogate(chosen, sample["now"], ratios, sample["advantage"], sample["marked"])
        before = sample["now"] if chosen.rollout_correction.old_logprobs_from == "engine" else old
        gaps = [float(a) - float(b) for a, b in zip(before, sample["engine"], strict=True)]
        weights, are_kept = correction(chosen.rollout_correction, gaps, sample["marked"])
        for t, gain in enumerate(gains):
            shares = []
            for aggregate in (chosen.aggregate, chosen.penalty_aggregate):
                if aggregate == "micro-batch-token-mean":
                    assert micro_batches is not None
                    members = next(batch for batch in micro_batches if number in batch)
                    shares.append(1 / (sum(lengths[i] for i in members) * len(micro_batches)))
                else:
                    shares.append(token_weight(aggregate, number, lengths, longest))
            penalty = -chosen.entropy_coef * sample["entropy"][t]
            if chosen.kl.coef and chosen.kl.place == "loss":
                divergence = chosen.kl.coef * kl(chosen.kl.estimator, sample["now"][t], sample["ref"][t])
                penalty = penalty + (divergence * torch.exp(ratios[t]) if chosen.kl.ratio_weighted else divergence)
            total = total + (penalty * shares[1] - gain * weights[t] * shares[0]) * are_kept[t]
    return total
