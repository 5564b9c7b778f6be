#!/usr/bin/env python3
"""Renders the chat_template that DeepSeek-V3 is published with, by jinja2, over generated conversations, and requires the same
prompts of chat/.

usage: jinja_agreement_test.py RENDER_PROMPTS TOKENIZER_CONFIG
"""
import json
import random
import subprocess
import sys

CONVERSATIONS = 200
SEED = 20261130
WORDS = ["ferry", "harbour", "1+1?", "<b>", "</think>", "<think>", "{{ x }}", "a\nb", "\n\n", " ", "'quoted'", '"', "\\", "你好", "🚢", "é",
         "<｜User｜>", "<｜end▁of▁sentence｜>", "```json", "%}", "\t", "\r\n", ""]


def text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))


def tool_calls(rng: random.Random) -> list[dict]:
    return [{"id": f"call_{i}", "type": "function",
             "function": {"name": rng.choice(["get_weather", "search"]), "arguments": json.dumps({"q": text(rng)}, ensure_ascii=False)}}
            for i in range(rng.randrange(1, 4))]


def conversation(rng: random.Random) -> list[dict]:
    messages = [{"role": "system", "content": text(rng)} for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    for _ in range(rng.randrange(1, 5)):
        messages.append({"role": "user", "content": text(rng)})
        while rng.random() < 0.4:
            calls = tool_calls(rng)
            content = None if rng.random() < 0.7 else text(rng)
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": text(rng)} for call in calls[:rng.randrange(len(calls) + 1)]]
        if rng.random() < 0.8:
            messages.append({"role": "assistant", "content": text(rng)})
    if rng.random() < 0.1:  # out of order: the template does not mind
        rng.shuffle(messages)
    return messages


def main() -> int:
    try:
        import jinja2.sandbox
    except ImportError:
        print("jinja2 is not installed (Debian: python3-jinja2): nothing was compared", file=sys.stderr)
        return 1
    with open(sys.argv[2], encoding="utf-8") as file:
        config = json.load(file)
    # As transformers renders chat templates.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(config["chat_template"])
    rng = random.Random(SEED)
    requests, expected = [], []
    for _ in range(CONVERSATIONS):
        messages, generate = conversation(rng), rng.random() < 0.7
        requests.append({"format": "v3", "messages": messages, "add_generation_prompt": generate})
        expected.append(template.render(messages=messages, add_generation_prompt=generate, bos_token=config["bos_token"]["content"]))
    output = subprocess.run([sys.argv[1]], input="".join(json.dumps(r) + "\n" for r in requests), capture_output=True, text=True, check=True).stdout
    results = [json.loads(line) for line in output.splitlines()]
    wrong = 0
    for request, want, got in zip(requests, expected, results, strict=True):
        if got.get("text") != want:
            wrong += 1
            if wrong <= 3:
                print(json.dumps({"request": request, "jinja": want, "chat": got}, ensure_ascii=False, indent=1))
    print(f"{len(results)} conversations (seed {SEED}), jinja2 {jinja2.__version__}, {wrong} differ")
    return 1 if wrong or len(results) != CONVERSATIONS else 0


if __name__ == "__main__":
    sys.exit(main())
