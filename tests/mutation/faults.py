"""Faults for the tests to find: small mistakes of the kind that slips in, one at a time.

They are such as no operator of `mutants` makes, which are its business.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A mistake in one file of the package.

    Attributes:
        file: The file, below `mlx_mmfree`.
        text: What stands there now, once.
        fault: What stands there instead.
        tests: Files and folders below `tests`, one of which should fail.
    """

    file: str
    text: str
    fault: str
    tests: tuple[str, ...]


FAULTS = {
    "samplers: top-p leaves out the token that reaches the mass": Fault(
        "generation/sampling.py",
        "likelier = long_cumsum(probabilities) - probabilities",
        "likelier = long_cumsum(probabilities)",
        ("generation/test_samplers.py",),
    ),
    "penalties: negative logits become likelier": Fault(
        "generation/sampling.py",
        "mx.where(seen > 0, seen / self.penalty, seen * self.penalty)",
        "seen / self.penalty",
        ("generation/test_penalties.py",),
    ),
    "memory: matrices unpacked together count once": Fault(
        "generation/memory.py",
        "sizes[matrix.input_dims] += matrix",
        "sizes[matrix.input_dims] = matrix",
        ("generation/test_memory.py",),
    ),
    "flags: a megabyte of another kind": Fault(
        "cli/parts/flags.py",
        '"MB": 10**6',
        '"MB": 2**20',
        ("cli/test_flags.py",),
    ),
    "doctor: a forced backend is reported to run what it cannot": Fault(
        "cli/doctor.py",
        "return forced if forced in names else None",
        "return forced",
        ("cli/test_doctor.py",),
    ),
    "sessions: a whole text is known": Fault(
        "generation/sessions.py",
        "below=len(tokens))",
        "below=len(tokens) + 1)",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: the shortest prefix is taken": Fault(
        "generation/sessions.py",
        "for key in reversed(self._store.prefixes(self._identity, text, below=len(tokens))):",
        "for key in self._store.prefixes(self._identity, text, below=len(tokens)):",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: a state is not cut to a prefix": Fault(
        "generation/sessions.py",
        "unpack(self._model, packed, holder.length - key.length)",
        "unpack(self._model, packed)",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: a prefix that cannot be had is given up": Fault(
        "generation/sessions.py",
        "            if states.can_rewind(self._model, each.length, key.length - each.length)\n",
        "            if key\n",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: models share the names of texts": Fault(
        "generation/sessions.py",
        "self._identity = identity_of(model)",
        'self._identity = b""',
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: states of other settings are taken": Fault(
        "generation/storage/session_file.py",
        "described = [FORMAT_VERSION, __version__, fingerprint(model), settings]",
        "described = [FORMAT_VERSION, __version__, fingerprint(model)]",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: changed bytes are believed": Fault(
        "generation/storage/session_file.py",
        "if stream.read() != hashlib.sha256(state).digest():",
        "if not stream.read():",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: odd numbers are believed": Fault(
        "generation/sessions.py",
        "    return trimmed is not None and _packed(trimmed) == packed",
        "    return trimmed is not None",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: a session is reported as on the disk before it is": Fault(
        "generation/storage/session_store.py",
        "            folder.write(key, content, chunks)\n",
        "            self._disk.add(key, None, 9)\n            folder.write(key, content, chunks)\n",
        ("generation/sessions/test_kills.py",),
    ),
    "sessions: files are written under their names": Fault(
        "generation/storage/session_folder.py",
        "            with new_file(file, content.nbytes) as new:",
        "            for new in (file,):",
        ("generation/sessions/test_kills.py",),
    ),
    "sessions: others' files do not count": Fault(
        "generation/storage/session_store.py",
        "        if self._unlisted_bytes * _LISTINGS_PER_LIMIT > self._disk.limit:",
        "        if self._unlisted_bytes > 9 * self._disk.limit:",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: leftovers of the living are removed": Fault(
        "generation/storage/session_folder.py",
        "                            clear_leftovers(part / unfinished[1])",
        "                            __import__('shutil').rmtree(part / entry.name)",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: a failing disk ends the thread": Fault(
        "generation/storage/session_store.py",
        "        except CheckpointError as error:",
        "        except ValueError as error:",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: a row changed by its neighbours is kept": Fault(
        "generation/sessions.py",
        "    if states.is_of_batch(model, state, count):\n        return None\n",
        "",
        ("generation/sessions/test_conversations.py",),
    ),
    "scheduling: prompts do not take turns": Fault(
        "generation/scheduling/prompt_reading.py",
        "self.rows = deque([*waiting, *served])",
        "self.rows = deque([*served, *waiting])",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: a chunk is larger than it should be": Fault(
        "generation/scheduling/prompt_reading.py",
        "left -= self._read_parts(parts, left)",
        "left -= self._read_parts(parts, self._step_size)",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: the last prefix is passed over": Fault(
        "generation/scheduling/rows.py",
        "while part.before is not None and not part.before.is_read:",
        "while part.before is not None and part.before.is_read:",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: random numbers are drawn twice": Fault(
        "generation/scheduling/choices.py",
        "    return pairs[:, 0], sampler.at(logits, chances)",
        "    return keys, sampler.at(logits, chances)",
        ("generation/scheduling/test_scheduler.py",),
    ),
    "scheduling: rows change their order when others leave": Fault(
        "generation/scheduling/writing.py",
        "back = mx.argsort(mx.array(order))\n            self._tokens",
        "back = mx.array(order)\n            self._tokens",
        ("generation/scheduling",),
    ),
    "scheduling: penalties see no token": Fault(
        "generation/scheduling/writing.py",
        "                tokens = group.part_of(self._tokens)",
        "                tokens = group.part_of(self._tokens * 0)",
        ("generation/test_batch.py",),
    ),
    "scheduling: a prompt is not found while its text is written": Fault(
        "generation/scheduling/scheduler.py",
        "[*self._reading.rows, *self._writing.rows] if",
        "[*self._reading.rows] if",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: a mark is not found while the rest of its prompt is read": Fault(
        "generation/scheduling/scheduler.py",
        "[*self._reading.rows, *self._writing.rows] if",
        "[*self._writing.rows] if",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: a state is kept one token early": Fault(
        "generation/scheduling/scheduler.py",
        "self._pending.append(_Pending(row.read[:-1], state, row.ends))\n        return events",
        "self._pending.append(_Pending(row.read, state, row.ends))\n        return events",
        ("generation/scheduling/test_drafting.py",),
    ),
    "scheduling: what has ended a text is kept with it": Fault(
        "generation/scheduling/writing.py",
        "row.before_stop or (len(read) - 1, self._batches.before_last(index))",
        "row.before_stop or (len(read), self._batches.before_last(index))",
        ("generation/sessions/test_conversations.py",),
    ),
    "scheduling: the first tokens of a stop string are kept": Fault(
        "generation/scheduling/writing.py",
        "            elif row.before_stop is None:\n",
        "            else:\n",
        ("generation/sessions/test_conversations.py",),
    ),
    "scheduling: the state before the end is another row's": Fault(
        "generation/scheduling/batches.py",
        "tree_map(lambda array: array[row : row + 1], state)",
        "tree_map(lambda array: array[:1], state)",
        ("generation/sessions/test_conversations.py",),
    ),
    "scheduling: what a draft model has read is counted twice": Fault(
        "generation/scheduling/drafting.py",
        "        self._read += len(tokens)\n",
        "        self._read += 2 * len(tokens)\n",
        ("generation/scheduling/test_drafting.py",),
    ),
    "drafts: numbers drawn for refused tokens are used up": Fault(
        "generation/speculative.py",
        "self._draws.key = self._keys[accepted]",
        "self._draws.key = self._keys[-1]",
        ("generation/test_ngrams.py",),
    ),
    "embeddings: padding counts in the mean": Fault(
        "generation/embeddings.py",
        'shares[row, :count] = 1 / count if chosen == "mean" else 0',
        'shares[row] = 1 / length if chosen == "mean" else 0',
        ("goldens/test_embeddings.py",),
    ),
    "embeddings: the last token is the longest text's": Fault(
        "generation/embeddings.py",
        'shares[row, 0 if chosen == "first" else count - 1] = 1',
        'shares[row, 0 if chosen == "first" else length - 1] = 1',
        ("goldens/test_embeddings.py",),
    ),
    "embeddings: vectors come in the order of their lengths": Fault(
        "generation/embeddings.py",
        "        batches.append([index])",
        "        batches.append([sum(map(len, batches))])",
        ("generation/test_embeddings.py",),
    ),
    "embeddings: the prompt of queries is left out": Fault(
        "generation/embeddings.py",
        "tokenizer.encode(prompt + text)",
        "tokenizer.encode(text)",
        ("generation/test_embeddings.py",),
    ),
}
