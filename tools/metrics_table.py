#!/usr/bin/env python3
"""Writes docs/metrics.md: every metric of the programs, with type, unit, labels and meaning.

usage: metrics_table.py ROOT [--check]        --check: fails if the page is not what it should be

Names, types and meanings are read from the sources; the labels are stated here, and what running processes export is compared
with the page by tests/deploy/observability_test.py.
"""
import pathlib
import re
import sys

FOLDERS = ["router", "worker", "prefill_worker", "decode_worker", "service"]
# What makes a family, in the sources, and of which type.
TYPES = {"Counters": "counter", "Counter": "counter", "Gauges": "gauge", "Gauge": "gauge", "Histograms": "histogram", "Family": "histogram"}
FAMILY = re.compile(r'\b(\w+)\(\s*(?:\w+,\s*)?"(ferry_\w+)",\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')

LABELS = {
    "ferry_build_info": ["version", "model", "fingerprint"],
    "ferry_config_seconds": ["name"],
    "ferry_data_links": ["link"],
    "ferry_batch_tokens": ["phase"],
    "ferry_handshake_total": ["result"],
    "ferry_kv_blocks": ["state"],
    "ferry_late_events_total": ["kind"],
    "ferry_prompt_tokens_total": ["source"],
    "ferry_requests_total": ["status"],
    "ferry_router_breaker_opened_total": ["worker"],
    "ferry_router_breaker_state": ["worker", "state"],
    "ferry_router_cancelled_total": ["phase"],
    "ferry_router_disagg_decisions_total": ["decision", "reason"],
    "ferry_router_http_responses_total": ["path", "status"],
    "ferry_router_prefill_slowdown": ["worker"],
    "ferry_router_rejected_total": ["reason"],
    "ferry_router_requests_total": ["model", "route", "outcome"],
    "ferry_router_retries_total": ["cause"],
    "ferry_router_stage_seconds": ["stage"],
    "ferry_router_tenant_requests": ["tenant", "state"],
    "ferry_router_worker_state": ["worker", "role", "state"],
    "ferry_state_slots": ["state"],
    "ferry_state_snapshots_total": ["event"],
    "ferry_step_seconds": ["phase"],
    "ferry_transfer_failures_total": ["reason"],
    "ferry_transfer_group_bytes_total": ["group", "kind"],
    "ferry_transfer_link_bytes_total": ["link", "path"],
}
# Their values are few: this is why.
VALUES = {
    "cause": "a status code, or `held`",
    "decision": "`remote` or `local`",
    "event": "`taken` or `dropped`",
    "fingerprint": "of the cache's layout; one a process",
    "group": "a group of the model's cache, `latent` for one",
    "kind": "a fixed word: of bytes `useful` or `padding`; of late messages what they were",
    "link": "`shm`, `tcp` or `rc`",
    "model": "a model that the process serves",
    "name": "a flag without its `_s`",
    "outcome": "a status code",
    "path": "of HTTP one that the router serves, or `other`; of transfers the way to the link, `host`, `device`, `shared` or `staged`",
    "phase": "of a step `prefill`, `decode` or `mixed`; of a request the router's phases",
    "reason": "a fixed word or a status code",
    "result": "a status code",
    "role": "`prefill`, `decode`, `both`, or `unknown` before the worker has answered",
    "route": "`remote`, `local`, or `none` for a request that reached no worker",
    "source": "`computed`, `cached` or `transferred`",
    "stage": "`tokenize`, `queue`, `dispatch`, `prefill`, `first_token`, `decode`",
    "state": "of a worker its link's state; of its breaker `closed`, `open` or `half_open`; of a tenant's requests `running` or `queued`; of blocks and slots what they are used for",
    "status": "a status code",
    "tenant": "one that `--tenant_limit` names, or `other` for all others together",
    "version": "of the program",
    "worker": "the address of a worker that the router knows now; it goes with the worker",
}


def families(root):
    """{name: (type, meaning, folder)}"""
    found, quoted = {}, set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.cc")):
            text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
            if "<prometheus/" not in text and '"prometheus/' not in text:
                continue
            quoted |= set(re.findall(r'"(ferry_[a-z0-9_]+)"', text))
            for maker, name, words in FAMILY.findall(text):
                meaning = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', words))
                where = "router" if folder == "router" else "worker"
                if name in found:
                    assert found[name][0] == TYPES[maker], name
                    where = "all"
                found[name] = (TYPES[maker], meaning, where)
    assert quoted == set(found), f"not understood: {sorted(quoted ^ set(found))}"
    return found


def unit(name):
    base = name.removesuffix("_total")
    for suffix in ("seconds", "bytes", "tokens", "blocks", "slots", "ratio", "requests", "workers"):
        if re.search(rf"_{suffix}(_|$)", base):
            return suffix
    return ""


def uncapitalised(words):
    """Abbreviations stay as they are."""
    return words if words[1:2].isupper() else words[0].lower() + words[1:]


def page(root):
    found = families(root)
    unknown = set(LABELS) - set(found)
    assert not unknown, f"labels of metrics that are not there: {sorted(unknown)}"
    lines = [
        "# Metrics", "",
        "What `/metrics` of each process says (`--metrics_listen`). Written by `tools/metrics_table.py` from the sources; a test scrapes a live",
        "system and compares. A metric whose labels have not occurred yet is not there. `exposer_…` are the exporter's own.", "",
        "| metric | of | type | unit | labels | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for name, (kind, meaning, where) in sorted(found.items()):
        labels = ", ".join(f"`{label}`" for label in LABELS.get(name, []))
        lines.append(f"| `{name}` | {where} | {kind} | {unit(name)} | {labels} | {uncapitalised(meaning)} |")
    lines += ["", "The values of a label are few, whatever clients send:", "", "| label | values |", "| --- | --- |"]
    used = {label for name in found for label in LABELS.get(name, [])}
    assert used == set(VALUES), f"labels without a word, or words without a label: {sorted(used ^ set(VALUES))}"
    lines += [f"| `{label}` | {VALUES[label]} |" for label in sorted(used)]
    lines += [
        "", "## Other names", "",
        "Dashboards made for vLLM ask for names of its own. Where the meaning is the same, the rules of `deploy/observability/ferry.rules.yaml` record",
        "them: `vllm:num_requests_running`, `vllm:time_to_first_token_seconds_bucket`, and so on. The processes themselves export `ferry_…` alone: a colon",
        "in a name is for what rules record, and every series would be there twice."]
    return "\n".join(lines) + "\n"


def main():
    root = pathlib.Path(sys.argv[1])
    path, text = root / "docs/metrics.md", page(root)
    if sys.argv[2:] == ["--check"]:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            print("docs/metrics.md is not up to date: run tools/metrics_table.py .")
            return 1
        return 0
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
