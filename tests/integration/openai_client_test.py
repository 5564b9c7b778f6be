#!/usr/bin/env python3
"""The official openai client and curl against `ferry serve`: texts are those of `ferry generate` over gRPC.

usage: openai_client_test.py BIN_DIR MODEL_DIR
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

import openai

BINARIES, MODEL = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
KEY = "sk-for-this-test-alone"
PROMPT = "It was a truth universally acknowledged, that the ferry"


def run(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, check=False, **more)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


class OpenAiClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(cls.folder.name)
        (folder / "keys").write_text(KEY + "\n")
        cls.log = folder / "log"
        cls.serve = subprocess.Popen(
            [BINARIES / "ferry", "serve", "--model", MODEL, "--port", "0", "--log_file", cls.log, "--chat_format", "v2",
             "--api_keys_file", folder / "keys", "--router_flag=--local_prefill_tokens=20"],
            stdout=subprocess.PIPE, text=True)
        cls.address = cls.serve.stdout.readline().split()[-1]
        line = cls.serve.stdout.readline()
        assert line.startswith("OpenAI API at http://127.0.0.1:"), line + cls.log.read_text()
        cls.url = line.split()[-1]
        cls.client = openai.OpenAI(base_url=cls.url, api_key=KEY, max_retries=0, timeout=120)

    @classmethod
    def tearDownClass(cls):
        cls.serve.terminate()
        code = cls.serve.wait(timeout=150)
        log = cls.log.read_text()
        cls.serve.stdout.close()
        cls.folder.cleanup()
        assert code == 0, log
        assert KEY not in log, "the key is in the log"

    def grpc_text(self, *flags):
        return run(BINARIES / "ferry", "generate", "--address", self.address, "--quiet", "--prompt", PROMPT, *flags).removesuffix("\n")

    def curl(self, path, *flags, key=KEY):
        out = run("curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {key}",
                  self.url.removesuffix("/v1") + path, *flags)
        body, _, code = out.rpartition("\n")
        return int(code), body

    def test_models(self):
        models = self.client.models.list().data
        self.assertEqual([model.id for model in models], [MODEL.name])
        self.assertEqual(self.client.models.retrieve(MODEL.name).id, MODEL.name)

    def test_texts_are_those_of_grpc(self):
        for ours, theirs in [(("--temperature", 0), {"temperature": 0}),
                             (("--temperature", 0.8, "--seed", 5, "--top_p", 0.9),
                              {"temperature": 0.8, "seed": 5, "top_p": 0.9})]:
            text = self.grpc_text("--max_tokens", 40, *ours)
            whole = self.client.completions.create(model=MODEL.name, prompt=PROMPT, max_tokens=40, **theirs)
            self.assertEqual(whole.choices[0].text, text)
            self.assertEqual(whole.usage.completion_tokens, 40)
            self.assertEqual(whole.choices[0].finish_reason, "length")
            chunks = list(self.client.completions.create(model=MODEL.name, prompt=PROMPT, max_tokens=40, stream=True,
                                                         stream_options={"include_usage": True}, **theirs))
            self.assertEqual("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), text)
            self.assertEqual(chunks[-1].usage.completion_tokens, 40)

    def test_branches_batches_and_ids(self):
        many = self.client.completions.create(model=MODEL.name, prompt=[PROMPT, "Once"], n=2, max_tokens=8, seed=3)
        self.assertEqual([choice.index for choice in many.choices], [0, 1, 2, 3])
        self.assertNotEqual(many.choices[0].text, many.choices[1].text)
        ids = [int(word) for word in
               run(BINARIES / "ferry", "tokenize", "--model", MODEL, "--ids", "--add_special_tokens", PROMPT).split()]
        by_text, by_ids = (self.client.completions.create(model=MODEL.name, prompt=prompt, max_tokens=8, temperature=0)
                           for prompt in (PROMPT, ids))
        self.assertEqual(by_ids.choices[0].text, by_text.choices[0].text)

    def test_stop_and_logprobs(self):
        free = self.client.completions.create(model=MODEL.name, prompt=PROMPT, max_tokens=40, temperature=0, logprobs=2)
        text = free.choices[0].text
        self.assertEqual("".join(free.choices[0].logprobs.tokens), text)
        self.assertEqual(len(free.choices[0].logprobs.token_logprobs), 40)
        stop = text[10:14]
        stopped = self.client.completions.create(model=MODEL.name, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop)
        self.assertEqual(stopped.choices[0].text, text[:text.index(stop)])
        self.assertEqual(stopped.choices[0].finish_reason, "stop")

    def test_chat(self):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the ferry?"}]
        request = pathlib.Path(self.folder.name) / "chat.json"
        request.write_text(json.dumps({"messages": messages}))
        ids = run(BINARIES / "ferry", "tokenize", "--model", MODEL, "--chat", request, "--chat_format", "v2", "--ids").split()
        same = self.client.completions.create(model=MODEL.name, prompt=[int(word) for word in ids], max_tokens=20, temperature=0)
        whole = self.client.chat.completions.create(model=MODEL.name, messages=messages, max_completion_tokens=20,
                                                    temperature=0, logprobs=True, top_logprobs=1)
        self.assertEqual(whole.choices[0].message.content, same.choices[0].text)
        self.assertEqual(whole.usage.prompt_tokens, len(ids))
        self.assertEqual(len(whole.choices[0].logprobs.content), 20)
        stream = self.client.chat.completions.create(model=MODEL.name, messages=messages, max_tokens=20, temperature=0, stream=True)
        chunks = list(stream)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual("".join(chunk.choices[0].delta.content or "" for chunk in chunks), same.choices[0].text)
        self.assertEqual(chunks[-1].choices[0].finish_reason, "length")
        # An answer goes back as it came, with all its empty members.
        further = self.client.chat.completions.create(
            model=MODEL.name, messages=[*messages, whole.choices[0].message.model_dump(), {"role": "user", "content": "And now?"}],
            max_tokens=5, user="u", metadata={"a": "b"}, store=False)
        self.assertGreater(further.usage.prompt_tokens, whole.usage.total_tokens)
        with self.assertRaises(openai.BadRequestError) as unknown:
            self.client.chat.completions.create(model=MODEL.name, messages=[{"role": "user", "content": "x", "colour": "red"}])
        self.assertIn('messages[0].colour is "red": there is no such member here', unknown.exception.message)

    def test_errors_are_the_clients_own(self):
        with self.assertRaises(openai.BadRequestError) as bad:
            self.client.completions.create(model=MODEL.name, prompt="x", temperature=-1)
        self.assertEqual(bad.exception.param, "temperature")
        self.assertIn("temperature is -1", str(bad.exception))
        with self.assertRaises(openai.BadRequestError):
            list(self.client.completions.create(model=MODEL.name, prompt=[10**6], stream=True))
        with self.assertRaises(openai.NotFoundError):
            self.client.completions.create(model="none", prompt="x")
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.url, api_key="sk-of-somebody-else", max_retries=0).models.list()
        with self.assertRaises(openai.BadRequestError) as tools:
            self.client.chat.completions.create(model=MODEL.name, messages=[{"role": "user", "content": "x"}], tools=[
                {"type": "function", "function": {"name": "f", "parameters": {}}}])
        self.assertIn("chat format v2 has no tools", str(tools.exception))

    def test_a_stream_that_is_left_is_no_longer_computed(self):
        stream = self.client.completions.create(model=MODEL.name, prompt=PROMPT, max_tokens=900, stream=True,
                                                extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        over = threading.Event()
        for _ in range(600):
            code, metrics = self.curl("/metrics")
            self.assertEqual(code, 200)
            if "\nferry_router_running_requests 0\n" in metrics:
                break
            over.wait(0.1)  # gauges are written each second
        else:
            self.fail(metrics)

    def test_curl(self):
        self.assertEqual(self.curl("/health", key="none"), (200, '{"status":"ok"}'))
        self.assertEqual(self.curl("/ready", key="none")[0], 200)
        self.assertEqual(self.curl("/v1/models", key="none-of-these-keys")[0], 401)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
        for flags in [(), ("--http1.0",), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue")]:
            code, answer = self.curl("/v1/completions", "-d", body, *flags)
            self.assertEqual(code, 200, answer)
            self.assertEqual(json.loads(answer)["choices"][0]["text"], self.grpc_text("--max_tokens", 5, "--temperature", 0))
        code, answer = self.curl("/v1/completions", "-d", "{")
        self.assertEqual((code, json.loads(answer)["error"]["type"]), (400, "invalid_request_error"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
