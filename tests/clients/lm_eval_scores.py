"""Scores of lm-eval through a server and through its own transformers backend, as JSON. Runs where the clients are.

    python lm_eval_scores.py http://127.0.0.1:8000 FOLDER SCRATCH

FOLDER: the served model in the format of transformers. SCRATCH: an empty folder for the tasks.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

HERE = Path(__file__).parent


def tasks(scratch: str) -> TaskManager:
    """The two small tasks, with the place of their file of questions filled in."""
    for file in (HERE / "lm_eval_tasks").iterdir():
        shutil.copy(file, scratch)
    for file in Path(scratch).glob("*.yaml"):
        file.write_text(file.read_text().replace("stories.jsonl", str(Path(scratch) / "stories.jsonl")))
    return TaskManager(include_path=scratch, include_defaults=False)


def scores(model: str, arguments: dict, names: list[str], manager: TaskManager, **more) -> dict:
    """Metrics of each task, and the answer to each question."""
    done = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=names, task_manager=manager, bootstrap_iters=0, batch_size=1, **more
    )
    answers = {name: [s["resps"] for s in sorted(done["samples"][name], key=lambda s: s["doc_id"])] for name in names}
    metrics = {n: {k: v for k, v in done["results"][n].items() if isinstance(v, float)} for n in names}
    return {"metrics": metrics, "answers": answers}


def main(url: str, folder: str, scratch: str) -> None:
    manager, both = tasks(scratch), ["kvasir_choices", "kvasir_words"]
    own = {"pretrained": folder, "dtype": "float32", "device": "cpu", "add_bos_token": True}
    served = {"model": "nano", "tokenizer": folder, "num_concurrent": 4, "max_retries": 1}
    completions = {**served, "base_url": f"{url}/v1/completions", "add_bos_token": True}
    chat = {**served, "base_url": f"{url}/v1/chat/completions"}
    results = {
        "hf": scores("hf", own, both, manager),
        "completions": scores("local-completions", completions, both, manager),
        "without_bos": scores("local-completions", {**completions, "add_bos_token": False}, both[:1], manager),
        "hf_chat": scores("hf", own, both[1:], manager, apply_chat_template=True),
        "chat": scores("local-chat-completions", chat, both[1:], manager, apply_chat_template=True),
    }
    print("RESULTS " + json.dumps(results, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
