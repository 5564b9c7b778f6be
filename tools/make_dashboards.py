#!/usr/bin/env python3
"""Writes the Grafana dashboards of deploy/observability/dashboards, of which this is the source.

usage: make_dashboards.py OUT_DIR
"""
import json
import pathlib
import sys

WIDTH, HEIGHT = 8, 8  # of a panel; a row has 24
SCOPE = 'namespace=~"$namespace"'  # in every query: of whose system


def histogram(quantile, metric, by="", where=""):
    labels = ", ".join(filter(None, ["le", by]))
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric}_bucket{{{SCOPE}{where}}}[$__rate_interval])))"


def quantiles(metric, where=""):
    return [(histogram(q, metric, where=where), f"p{int(q * 100)}") for q in (0.5, 0.9, 0.99)]


def rate(metric, by="", where=""):
    inner = f"rate({metric}{{{SCOPE}{where}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def gauge(metric, by="", where=""):
    inner = f"{metric}{{{SCOPE}{where}}}"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def mean(metric, by="instance", where=""):
    return f"{rate(metric + '_sum', by, where)} / ({rate(metric + '_count', by, where)} > 0)"


# What may never happen is drawn at zero.
def or_zero(query):
    return f"{query} or vector(0)"


PREFILL = ', app_kubernetes_io_name="ferry-prefill"'
DECODE = ', app_kubernetes_io_name="ferry-decode"'

# {file: (title, [(panel, unit, [(query, legend), ...], stacked), ...])}
DASHBOARDS = {
    "overview": ("Ferry: service overview", [
        ("Requests", "reqps", [(rate("ferry_router_requests_total", "outcome"), "{{outcome}}")], True),
        ("Failures", "percentunit", [("ferry:router_failures:ratio5m{%s}" % SCOPE, "failed")], False),
        ("Serving workers", "short", [(f'count by (role) (ferry_router_worker_state{{{SCOPE}, state="serving"}})', "{{role}}")], False),
        ("Time to first token", "s", quantiles("ferry_router_ttft_seconds"), False),
        ("Gap between tokens", "s", quantiles("ferry_router_itl_seconds"), False),
        ("Arrival to end", "s", quantiles("ferry_router_e2e_seconds"), False),
        ("Tokens", "short", [(rate("ferry_router_prompt_tokens_total"), "prompt"), (rate("ferry_router_generated_tokens_total"), "generated")], False),
        ("Running and waiting", "short", [(gauge("ferry_router_running_requests"), "running"), (gauge("ferry_router_queue_requests"), "in the queue")], False),
        ("Cache in use", "percentunit", [("ferry:kv_usage:ratio{%s}" % SCOPE, "{{instance}}")], False),
    ]),
    "router": ("Ferry: router", [
        ("Where a request's time goes (mean)", "s", [(mean("ferry_router_stage_seconds", "stage"), "{{stage}}")], False),
        ("Time in the queue", "s", quantiles("ferry_router_stage_seconds", ', stage="queue"'), False),
        ("Queue", "short", [(gauge("ferry_router_queue_requests"), "requests")], False),
        ("Memory of the queue", "bytes", [(gauge("ferry_router_queue_bytes"), "bytes")], False),
        ("Where prompts are computed", "reqps", [(rate("ferry_router_disagg_decisions_total", "decision, reason"), "{{decision}}: {{reason}}")], True),
        ("One decision", "s", quantiles("ferry_router_select_seconds"), False),
        ("Observed over predicted time to first token", "short", quantiles("ferry_router_predicted_ttft_error_ratio"), False),
        ("Refused", "reqps", [(or_zero(rate("ferry_router_rejected_total", "reason")), "{{reason}}")], True),
        ("Repeated tries", "reqps", [(or_zero(rate("ferry_router_retries_total", "cause")), "{{cause}}")], True),
        ("Cancelled by clients", "reqps", [(or_zero(rate("ferry_router_cancelled_total", "phase")), "{{phase}}")], True),
        ("Outputs that went on elsewhere", "reqps", [(rate("ferry_router_migrations_total"), "migrations")], False),
        ("Workers by state", "short", [(gauge("ferry_router_worker_state", "state"), "{{state}}")], True),
        ("Prefill slowdown by worker", "short", [(f"max by (worker) (ferry_router_prefill_slowdown{{{SCOPE}}})", "{{worker}}")], False),
        ("Prefix index", "short", [(gauge("ferry_router_index_entries"), "announced"), (gauge("ferry_router_index_predicted"), "predicted")], False),
        ("Memory of the prefix index", "bytes", [(gauge("ferry_router_index_bytes"), "bytes")], False),
        ("Prompt tokens not computed again", "percentunit", [("ferry:prefix_hits:ratio5m{%s}" % SCOPE, "{{instance}}")], False),
    ]),
    "prefill": ("Ferry: prefill workers", [
        ("Running", "short", [(gauge("ferry_requests_running", "instance", PREFILL), "{{instance}}")], True),
        ("Waiting", "short", [(gauge("ferry_requests_waiting", "instance", PREFILL), "{{instance}}")], True),
        ("Prompt tokens to compute", "short", [(gauge("ferry_waiting_tokens", "instance", PREFILL), "{{instance}}")], True),
        ("Prompt tokens by where they came from", "short", [(rate("ferry_prompt_tokens_total", "source", PREFILL), "{{source}}")], True),
        ("A step", "s", quantiles("ferry_step_seconds", PREFILL), False),
        ("Tokens a step (mean)", "short", [(mean("ferry_batch_tokens", where=PREFILL), "{{instance}}")], False),
        ("Requests ended", "reqps", [(rate("ferry_requests_total", "status", PREFILL), "{{status}}")], True),
        ("Held for another decode worker", "short", [(gauge("ferry_leases", "instance", PREFILL), "{{instance}}")], False),
        ("Leases that expired", "reqps", [(rate("ferry_lease_expired_total", where=PREFILL), "expired")], False),
    ]),
    "decode": ("Ferry: decode workers", [
        ("Running", "short", [(gauge("ferry_requests_running", "instance", DECODE), "{{instance}}")], True),
        ("Waiting", "short", [(gauge("ferry_requests_waiting", "instance", DECODE), "{{instance}}")], True),
        ("Generated tokens", "short", [(rate("ferry_generated_tokens_total", "instance", DECODE), "{{instance}}")], True),
        ("A step", "s", quantiles("ferry_step_seconds", DECODE), False),
        ("Tokens a step (mean)", "short", [(mean("ferry_batch_tokens", where=DECODE), "{{instance}}")], False),
        ("Preemptions", "reqps", [(rate("ferry_preemptions_total", "instance", DECODE), "{{instance}}")], False),
        ("Prompt tokens by where they came from", "short", [(rate("ferry_prompt_tokens_total", "source", DECODE), "{{source}}")], True),
        ("Requests ended", "reqps", [(rate("ferry_requests_total", "status", DECODE), "{{status}}")], True),
        ("Cache in use", "percentunit", [('ferry:kv_usage:ratio{%s%s}' % (SCOPE, DECODE), "{{instance}}")], False),
    ]),
    "cache": ("Ferry: KV cache and transfer", [
        ("Blocks by use", "short", [(gauge("ferry_kv_blocks", "state"), "{{state}}")], True),
        ("Cache in use", "percentunit", [("ferry:kv_usage:ratio{%s}" % SCOPE, "{{instance}}")], False),
        ("Quarantined blocks", "short", [(gauge("ferry_kv_blocks", "instance", ', state="quarantined"'), "{{instance}}")], False),
        ("A transfer", "s", quantiles("ferry_transfer_seconds"), False),
        ("Speed while transferring", "Bps", [("ferry:transfer_speed:bytes_per_second5m{%s}" % SCOPE, "{{instance}}")], False),
        ("Bytes by link", "Bps", [(rate("ferry_transfer_link_bytes_total", "link"), "{{link}}")], True),
        ("Bytes by what they are", "Bps", [(rate("ferry_transfer_group_bytes_total", "group, kind"), "{{group}} {{kind}}")], True),
        ("Transfers under way", "short", [(gauge("ferry_transfer_inflight", "instance"), "{{instance}}")], True),
        ("Failed transfers", "reqps", [(or_zero(rate("ferry_transfer_failures_total", "reason")), "{{reason}}")], True),
        ("Handshakes", "reqps", [(rate("ferry_handshake_total", "result"), "{{result}}")], True),
        ("Messages that came too late", "reqps", [(or_zero(rate("ferry_late_events_total", "kind")), "{{kind}}")], True),
        ("Size of a transfer", "bytes", quantiles("ferry_transfer_bytes"), False),
    ]),
}


def panel(number, title, unit, queries, stacked):
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": number % 3 * WIDTH, "y": number // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {
            "fillOpacity": 20 if stacked else 0, "stacking": {"mode": "normal" if stacked else "none"}}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [{"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend} for i, (expr, legend) in enumerate(queries)],
    }


def dashboard(name, title, panels):
    return {
        "uid": f"ferry-{name}",
        "title": title,
        "tags": ["ferry"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            {"name": "namespace", "type": "query", "datasource": {"type": "prometheus", "uid": "$datasource"},
             "query": "label_values(ferry_build_info, namespace)", "refresh": 2, "includeAll": True, "allValue": ".*",
             "current": {"text": "All", "value": "$__all"}},
        ]},
        "panels": [panel(number, *rest) for number, rest in enumerate(panels)],
    }


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, (title, panels) in DASHBOARDS.items():
        (out / f"{name}.json").write_text(json.dumps(dashboard(name, title, panels), indent=1) + "\n")


if __name__ == "__main__":
    main()
