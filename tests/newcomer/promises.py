"""Runs the tests that show what newcomers are promised, promise by promise.

python -m tests.newcomer.promises [WORD ...]

Words choose the promises whose sentences hold one of them.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISES = {
    "Tables, lists of JSON, compressed files and texts are data, and faults name file and line": (
        "tests/training/corpus/test_rows.py",
        "tests/training/test_data_forms.py",
    ),
    "A chat template may be given, and stays beside the adapter": (
        "tests/cli/test_chat_template.py",
    ),
    "Unknown keys of a model are refused with the nearest name": (
        "tests/training/test_first_model.py::test_a_key_that_nothing_reads_is_refused",
        "tests/training/test_first_model.py::test_keys_that_transformers_writes_are_taken",
    ),
    "A string is no list of prompts": (
        "tests/generation/test_batch.py::test_bad_arguments_are_refused",
    ),
    "A run tells its weights, its data and each report, and says when nothing was learned": (
        "tests/training/test_reports.py",
    ),
    "A dense model becomes ternary with --steps and --learning-rate": (
        "tests/training/test_ternarize.py::test_the_command",
        "tests/training/test_ternarize.py::test_choices_that_do_not_fit",
    ),
    "A conversion without masters names what is possible": (
        "tests/hub/test_to_hf.py::TestRefused::test_packed_weights_without_a_format",
    ),
    "The commands of the main page run": (
        "tests/readme/test_commands.py::test_section_runs[.: Fine-tune]",
        "tests/readme/test_text.py::test_main_page_is_short_and_in_order",
    ),
    "Fine-tuning, fusing and adapters are public in Python": ("tests/test_public_api.py",),
    "Docstrings list their arguments themselves": (
        "tests/test_docstrings.py::test_a_docstring_says_all_itself",
    ),
    "Mistakes in Python are answered with what to write": ("tests/layers/test_ways_out.py",),
    "The page shows the server's numbers, formulas, colours, the context, and deletes messages": (
        "tests/server/browser/test_formulas.py",
        "tests/server/browser/test_settings.py::test_every_setting_reaches_the_server",
    ),
    "The bundled model is called demo": ("tests/hub/test_bundled_name.py",),
    "Nearly right names suggest the known ones": ("tests/hub/test_names_of_models.py",),
    "A chat is saved, loaded, regenerated, and takes another system prompt": (
        "tests/cli/test_chat.py::test_a_conversation_is_saved_loaded_and_answered_anew",
    ),
    "doctor begins with its verdict": (
        "tests/cli/test_doctor.py::test_the_verdict_comes_first_and_tables_when_asked_for",
    ),
    "Known models come with their sizes, chat models first": (
        "tests/cli/test_models.py::test_known_chat_models_come_first_with_their_sizes",
        "tests/cli/test_models.py::test_known_repositories_of_a_family",
    ),
    "A port in use names the next free one": (
        "tests/server/test_process.py::test_a_port_in_use_is_named_with_a_free_one",
        "tests/server/test_process.py::test_a_port_that_is_taken",
    ),
}


def main(*words: str) -> int:
    failed = 0
    for promise, tests in PROMISES.items():
        if words and not any(word.lower() in promise.lower() for word in words):
            continue
        command = [sys.executable, "-m", "pytest", "--exhaustive", "-n", "0", "-q", "--no-header"]
        command += ["-m", "", *tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
        print(f"{'yes' if done.returncode == 0 else 'NO '}  {promise}: {lines[-1]}", flush=True)
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
