"""Faults for the tests to find: small mistakes of the kind that slips in, one at a time."""

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
    "tokenizer: a cut character at the end is lost": Fault(
        "tokenizer/vocabulary.py",
        'self._decoder.decode(b"", final=True)',
        'self._decoder.decode(b"")',
        ("tokenizer/test_detokenizer.py",),
    ),
    "tokenizer: a stopped encoding is not started again": Fault(
        "tokenizer/tokenizer_json.py",
        "if self._process.process_id is None:",
        "if self._process.process_id is not None:",
        ("tokenizer/test_hostile_tokenizers.py",),
    ),
    "chat: a hidden special token stays hidden": Fault(
        "tokenizer/chat.py",
        "part if isinstance(part, int) else self._shield.restore(part)",
        "part",
        ("tokenizer/test_rendered_chat.py", "tokenizer/test_chat_template.py"),
    ),
    "chat: templates reach every attribute of dictionaries": Fault(
        "tokenizer/chat_sandbox.py",
        "return attr in _DICT_METHODS",
        "return True",
        ("tokenizer/test_chat_template.py",),
    ),
    "maps: a batch norm joined with a matrix forgets the matrix's bias": Fault(
        "layers/norms.py",
        'y = y + (shift + linear.bias * scale if "bias" in linear else shift)',
        "y = y + shift",
        ("layers/test_batch_norm.py",),
    ),
    "maps: the running variance is the biased one": Fault(
        "layers/norms.py",
        '("running_var", var * (count / (count - 1)))',
        '("running_var", var)',
        ("layers/test_batch_norm.py",),
    ),
    "maps: the root of a sum of zeros has no gradient": Fault(
        "spatial_mixers/cross_covariance_attention.py",
        "return x / mx.sqrt(mx.maximum(squares, _EPS**2))",
        "return x / mx.maximum(mx.sqrt(squares), _EPS)",
        ("spatial_mixers/test_contract.py",),
    ),
    "image models: the last block of a stage has no attention": Fault(
        "models/swiftformer.py",
        "if place == config.layers[stage] - 1",
        "if place == config.layers[stage]",
        ("hub/test_timm_models.py",),
    ),
    "image models: a second head is not asked": Fault(
        "models/swiftformer.py",
        "(self.classes(x) + self.distilled(x)) / 2",
        "self.classes(x)",
        ("hub/test_timm_models.py",),
    ),
    "images: the header's size is not looked at": Fault(
        "images/picture_file.py",
        "if width * height > max_pixels:",
        "if width > max_pixels:",
        ("images/test_picture_file.py",),
    ),
    "images: markers within segments count as scans": Fault(
        "images/picture_file.py",
        "place = marker.end() + max(length, 2)",
        "place = marker.end() + 2",
        ("images/test_picture_file.py",),
    ),
    "images: a picture may become any size when it is scaled": Fault(
        "images/processor.py",
        "if not rows or not columns or rows * columns > MAX_PIXELS:",
        "if not rows or not columns:",
        ("images/test_processor.py",),
    ),
    "images: a map is that of another image": Fault(
        "evaluation/maps.py",
        "wanted[:, None]",
        "wanted[::-1, None]",
        ("evaluation/test_class_maps.py",),
    ),
    "download: what an earlier start brought is not hashed": Fault(
        "hub/remote/cache_content.py",
        "(_PIECE_BYTES):\n            self._count(piece)",
        "(_PIECE_BYTES):\n            self.nbytes += len(piece)",
        ("hub/test_download.py",),
    ),
    "download: waits for as long as a server asks": Fault(
        "hub/remote/cache_content.py",
        "return min(float(asked[:9]), MAX_DELAY_S)",
        "return float(asked[:9])",
        ("hub/test_patience.py",),
    ),
    "corpus: an id of a token file may be one too large": Fault(
        "training/corpus/token_file.py",
        "if largest >= header.vocab_size:",
        "if largest > header.vocab_size:",
        ("training/corpus/test_token_file.py",),
    ),
    "corpus: damaged ids are read": Fault(
        "training/corpus/token_file.py",
        "if left or digest.hexdigest() != header.checksum:",
        "if left:",
        ("training/corpus/test_token_file.py",),
    ),
    "corpus: ids of another tokenizer are learned": Fault(
        "training/run_tokens.py",
        "if file.header.tokenizer != digest:",
        "if not file.header.tokenizer:",
        ("training/test_run_tokens.py",),
    ),
    "corpus: a stage draws again what an earlier one drew": Fault(
        "training/corpus/mixture.py",
        "_Shares(shares, seed, number), dict(drawn))",
        "_Shares(shares, seed, number), dict.fromkeys(tokens, 0))",
        ("training/corpus/test_mixture.py",),
    ),
    "corpus: held-out documents are learned too": Fault(
        "training/corpus/tokenize.py",
        "texts = [t for t, s in zip(encoded.documents, sides, strict=True) if s == side]",
        "texts = encoded.documents",
        ("training/corpus/test_tokenize.py",),
    ),
    "locks: a busy folder passes for one without locks": Fault(
        "files/writing.py",
        "return None if isinstance(error, BlockingIOError) else UNKNOWN",
        "return UNKNOWN",
        ("files/test_replacing.py",),
    ),
    "replacing: a folder moved aside is not put back": Fault(
        "files/writing.py",
        "if (stage / _OLD).exists() and (stage / _NEW).exists():",
        "if (stage / _OLD).exists() and not (stage / _NEW).exists():",
        ("files/test_replacing.py",),
    ),
    "safetensors: overlapping tensors are read": Fault(
        "files/tensors.py",
        "if entry.start < end:",
        "if entry.stop < end:",
        ("files/test_safetensors.py",),
    ),
    "safetensors: shards grow beyond their size": Fault(
        "files/tensors.py",
        "size += group.nbytes",
        "size = group.nbytes",
        ("files/test_safetensors.py", "hub/test_to_mlx.py"),
    ),
    "GGUF: offsets without padding": Fault(
        "files/gguf_file.py",
        "position += tensor.nbytes + _padding(tensor.nbytes)",
        "position += tensor.nbytes",
        ("files/test_gguf_parts.py", "hub/test_to_gguf.py"),
    ),
    "conversion: whole numbers change their dtype": Fault(
        "hub/conversion/to_folder.py",
        "dtype is None or not mx.issubdtype(stored, mx.floating)",
        "dtype is None",
        ("hub/test_to_mlx.py", "hub/test_convert.py"),
    ),
    "adapters: the number of layers counts tensors": Fault(
        "hub/adapters/adapter_folder.py",
        "len(numbers) - min(layers) if layers else 0",
        "len(layers)",
        ("hub/test_adapters.py",),
    ),
    "LoRA: row lengths without half of the mixed term": Fault(
        "layers/lora.py",
        "mixed = 2.0 * ",
        "mixed = ",
        ("layers/test_lora.py",),
    ),
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
    "stop strings: one is shown up to its last character": Fault(
        "generation/decode.py",
        "longest = min(len(text), len(string) - 1)",
        "longest = min(len(text), len(string) - 2)",
        ("generation/test_stop.py",),
    ),
    "perplexity: the variance of a sample divided by its size": Fault(
        "evaluation/perplexity.py",
        "(self.tokens * (self.tokens - 1))",
        "(self.tokens * self.tokens)",
        ("evaluation/test_perplexity.py",),
    ),
    "batches: the first answer token is not learned": Fault(
        "training/batches.py",
        "at + max(sample.prompt - 1, 0)",
        "at + sample.prompt",
        ("training/test_batches.py",),
    ),
    "resume: what was not yet reported is forgotten": Fault(
        "training/loop.py",
        'progress | {"settings": self._settings.record}',
        "new_progress(self._settings.record) | "
        '{name: progress[name] for name in ("step", "tokens")}',
        ("training/test_loop.py",),
    ),
    "schedule: warm-up begins at nothing": Fault(
        "training/optimizer.py",
        "optim.linear_schedule(peak / settings.warmup_steps, peak, settings.warmup_steps)",
        "optim.linear_schedule(0.0, peak, settings.warmup_steps)",
        ("training/test_loop.py", "training/test_settings.py"),
    ),
    "data parallel: the weights of all processes are added": Fault(
        "training/data_parallel.py",
        "arrays = [mx.zeros_like(array) for array in arrays]",
        "pass",
        ("training/test_data_parallel.py",),
    ),
    "training: what all blocks share is exchanged first": Fault(
        "training/data_parallel.py",
        'key=lambda name: "." not in name',
        'key=lambda name: "." in name',
        ("training/test_gradient_buckets.py",),
    ),
    "training: a bucket's numbers are parted one place off": Fault(
        "training/data_parallel.py",
        "mx.split(numbers, ends[:-1])",
        "mx.split(numbers, [end + 1 for end in ends[:-1]])",
        ("training/test_gradient_buckets.py",),
    ),
    "training: an embedding that the head shares is drawn as large as another": Fault(
        "training/first_model.py",
        "if head is None or head.is_shared:",
        "if standard_deviation is not None and head is None:",
        ("training/test_first_model.py",),
    ),
    "rope: YaRN blends up to the pair before": Fault(
        "layers/attention/positions.py",
        "low, high = math.floor(low), math.ceil(high)",
        "low, high = math.floor(low), math.floor(high)",
        ("layers/test_rope.py",),
    ),
    "window: a slot is overwritten too early": Fault(
        "ops/attention_step.py",
        "sinks + (first - sinks) % window",
        "first % (sinks + window)",
        ("layers/test_key_value_state.py", "token_mixers/test_gqa.py"),
    ),
    "mask: the window holds a token more": Fault(
        "layers/attention/key_values.py",
        "query - key < window",
        "query - key <= window",
        ("token_mixers/test_gqa.py",),
    ),
    "window on both sides: a block does not see the next one": Fault(
        "layers/attention/key_values.py",
        "high = query // step * step + window",
        "high = query // step * step + 1",
        ("layers/test_windows.py",),
    ),
    "window: a piece forgets which tokens of it are padding": Fault(
        "layers/context.py",
        "mx.clip(counts - start, 0, stop - start)",
        "mx.clip(counts, 0, stop - start)",
        ("layers/test_windows.py",),
    ),
    "Longformer: a global token in the window counts twice": Fault(
        "token_mixers/longformer.py",
        "seen = mx.logical_and(seen, others)",
        "seen = mx.logical_or(seen, mx.logical_not(others))",
        ("token_mixers/test_longformer.py",),
    ),
    "Big Bird: the end beside a block counts twice": Fault(
        "token_mixers/big_bird.py",
        "counts_once[0, 1] = counts_once[-1, 3] = False",
        "counts_once[0, 1] = False",
        ("token_mixers/test_big_bird.py",),
    ),
    "ALiBi: heads beyond a power of 2 take the first slopes": Fault(
        "layers/attention/positions.py",
        "_slopes(2 * known)[::2]",
        "_slopes(2 * known)",
        ("layers/test_position_bias.py",),
    ),
    "HGRN2: the norm of the output takes the epsilon of the others": Fault(
        "models/hgrn2.py",
        "norm_eps=_OUTPUT_NORM_EPS",
        "norm_eps=config.norm_eps",
        ("goldens/test_models.py",),
    ),
    "Reformer: a token alone sees the chunk behind its own": Fault(
        "token_mixers/reformer.py",
        "(rank // chunk - 1)",
        "(rank // chunk)",
        ("goldens/test_models.py",),
    ),
    "Reformer: both streams are averaged": Fault(
        "models/reformer.py",
        "def joined(self",
        "def unused(self",
        ("models/test_reformer.py",),
    ),
    "MLGRU: lower bounds are shares of dims, not of blocks": Fault(
        "models/parts/recurrent.py",
        "shares = mx.softmax(self.lower_bounds.astype(mx.float32), axis=0)",
        "shares = mx.softmax(self.lower_bounds.astype(mx.float32), axis=-1)",
        ("models/test_hgrn_bit.py",),
    ),
    "packing: a tie is rounded away from zero": Fault(
        "ops/host_blocks.py",
        "(scaled >= -half)",
        "(scaled > -half)",
        ("ops/test_ternary.py",),
    ),
    "ternary: the smallest scale is another one": Fault(
        "ops/ternary.py",
        "mx.maximum(mean.reshape(1), 1e-5)",
        "mx.maximum(mean.reshape(1), 1e-6)",
        ("ops/test_ternary.py",),
    ),
    "long sums: numbers behind the last whole block are left out": Fault(
        "ops/long_sums.py",
        "x = sums if whole == count else mx.concatenate([sums, rest], axis=along)",
        "x = sums",
        ("ops/test_long_sums.py",),
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
    "doctor: a forced backend is said to run what it cannot": Fault(
        "cli/doctor.py",
        "return forced if forced in names else None",
        "return forced",
        ("cli/test_doctor.py",),
    ),
    "messages: no way out of other settings": Fault(
        "training/run_folder.py",
        '            "Resume with the same settings or give another output folder."\n',
        "",
        ("training/test_loop.py",),
    ),
    "JSON: one level deeper than allowed": Fault(
        "files/reading.py",
        "for _ in range(MAX_DEPTH + 1):",
        "for _ in range(MAX_DEPTH + 2):",
        ("files/test_json_reader.py",),
    ),
    "pack cache: a source that was written again is not noticed": Fault(
        "hub/checkpoint/pack_cache.py",
        "stat.st_size, stat.st_mtime_ns]",
        "stat.st_size]",
        ("hub/test_pack_cache.py",),
    ),
    "upload: private files go to a public repository": Fault(
        "hub/publish/upload.py",
        "if plan.is_private and not api.repo_info(plan.repository).private:",
        "if not plan.is_private and not api.repo_info(plan.repository).private:",
        ("hub/test_upload.py",),
    ),
    "GRU: the roles of the update gate are swapped": Fault(
        "token_mixers/gru.py",
        "return update * hidden + (1.0 - update) * candidate",
        "return update * candidate + (1.0 - update) * hidden",
        ("token_mixers/test_gru.py",),
    ),
    "weights: a recurrence adds all of each value": Fault(
        "layers/recurrence.py",
        "values = free[..., None] * mx.eye(length)[:, None]",
        "values = mx.ones_like(free)[..., None] * mx.eye(length)[:, None]",
        ("token_mixers/contract/test_mixing_weights.py",),
    ),
    "weights: the memory mixer's are those of the block's input": Fault(
        "models/parts/stack.py",
        'partial(self._weights, "memory", given, memory=context.memory)',
        'partial(self._weights, "memory", given, memory=x)',
        ("evaluation/test_mixing_maps.py",),
    ),
    "gMLP: a causal gate has a gradient beyond the diagonal": Fault(
        "token_mixers/gmlp.py",
        "weights if places.seen is None else mx.where(places.seen, weights, 0.0)",
        "weights",
        ("token_mixers/contract/test_seen.py",),
    ),
    "FNet: padding counts in the length": Fault(
        "token_mixers/fnet.py",
        "count = mx.maximum(place[:, -1:] + 1, 1)[..., None]",
        "count = mx.full((x.shape[0], 1, 1), x.shape[1])",
        ("token_mixers/test_fnet.py",),
    ),
    "pooling: what lies before a sample is averaged": Fault(
        "token_mixers/pooling.py",
        "is_in = mx.logical_and(place + step >= 0, token + step <= ends)",
        "is_in = mx.logical_and(token + step >= 0, token + step <= ends)",
        ("token_mixers/test_pooling.py",),
    ),
    "places: columns of a packed sample are counted from the row": Fault(
        "layers/held_tokens.py",
        "columns = columns - reading.begins[..., None]",
        "columns = columns + 0 * reading.begins[..., None]",
        ("token_mixers/test_synthesizer.py",),
    ),
    "Reformer: the first chunk looks at the last one of its own round": Fault(
        "token_mixers/reformer.py",
        "(index // number - 1) % rounds * number",
        "(index // number) % rounds * number",
        ("goldens/mixers/test_reformer.py",),
    ),
    "Reformer: rounds count alike": Fault(
        "token_mixers/reformer.py",
        "weights = total * mx.exp(",
        "weights = 1.0 + 0.0 * mx.exp(",
        ("goldens/mixers/test_reformer.py",),
    ),
    "Sinkhorn: sorted values are taken from the keys": Fault(
        "token_mixers/sinkhorn.py",
        "values = mx.concatenate([sorted_values, values], axis=3)",
        "values = mx.concatenate([sorted_keys, values], axis=3)",
        ("goldens/mixers/test_sinkhorn.py",),
    ),
    "reversible blocks: gradients of the channel mixer are lost": Fault(
        "models/parts/stack.py",
        "gradients = [a + b for a, b in zip(own, others, strict=True)]",
        "gradients = others",
        ("models/test_reversible.py",),
    ),
    "ring attention: parts are added without their largest scores": Fault(
        "ops/ring_attention.py",
        "self.total * before + weights",
        "self.total + weights",
        ("goldens/mixers/test_ring_attention.py",),
    ),
    "sessions: a whole text is known": Fault(
        "generation/sessions.py",
        "if length < len(tokens))\n        for key in reversed",
        "if length <= len(tokens))\n        for key in reversed",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: the shortest beginning is taken": Fault(
        "generation/sessions.py",
        "for key in reversed(list(keys_of_beginnings(self._identity, text, lengths))):",
        "for key in list(keys_of_beginnings(self._identity, text, lengths)):",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: a state is not cut to a beginning": Fault(
        "generation/sessions.py",
        "        if holder == key:\n            return state\n",
        "        if holder:\n            return state\n",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: a beginning that cannot be had is given up": Fault(
        "generation/sessions.py",
        "            if can_rewind(self._model, each.length, key.length - each.length)\n",
        "            if key\n",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: models share the names of texts": Fault(
        "generation/session_store.py",
        "digest = hashlib.sha256(identity)",
        "digest = hashlib.sha256()",
        ("generation/sessions/test_sessions.py",),
    ),
    "sessions: states of other settings are taken": Fault(
        "generation/session_store.py",
        "described = [FORMAT_VERSION, __version__, fingerprint(model), settings]",
        "described = [FORMAT_VERSION, __version__, fingerprint(model)]",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: changed bytes are believed": Fault(
        "generation/session_store.py",
        "if stream.read() != hashlib.sha256(state).digest():",
        "if not stream.read():",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: odd numbers are believed": Fault(
        "generation/sessions.py",
        "    return trimmed is not None and _joined(trimmed) == data",
        "    return trimmed is not None",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: what is used is not touched on the disk": Fault(
        "generation/sessions.py",
        "        if self._store.has_folder:\n            self._store.touch(key)\n        holder",
        "        holder",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: a session is told to be on the disk before it is": Fault(
        "generation/session_store.py",
        "            folder.write(key, content, state)\n",
        "            self._disk.add(key, None, 9)\n            folder.write(key, content, state)\n",
        ("generation/sessions/test_kills.py",),
    ),
    "sessions: files are written under their names": Fault(
        "generation/session_store.py",
        "            with new_file(file, content.nbytes) as new:",
        "            for new in (file,):",
        ("generation/sessions/test_kills.py",),
    ),
    "sessions: others' files do not count": Fault(
        "generation/session_store.py",
        "        if self._unlisted_bytes * _LISTINGS_PER_LIMIT > self._disk.limit:",
        "        if self._unlisted_bytes > 9 * self._disk.limit:",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: leftovers of the living are removed": Fault(
        "generation/session_store.py",
        "                            clear_leftovers(part / unfinished[1])",
        "                            __import__('shutil').rmtree(part / entry.name)",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: a failing disk ends the thread": Fault(
        "generation/session_store.py",
        "        except CheckpointError as error:",
        "        except ValueError as error:",
        ("generation/sessions/test_session_folder.py",),
    ),
    "sessions: a row changed by its neighbours is kept": Fault(
        "generation/sessions.py",
        "    if is_of_batch(model, state, count):\n        return None\n",
        "",
        ("generation/sessions/test_conversations.py",),
    ),
    "states: free slots of a joined row hold the first token": Fault(
        "layers/attention/key_values.py",
        "mx.pad(self.positions, missing, constant_values=-1))",
        "mx.pad(self.positions, missing))",
        ("token_mixers/contract/test_joining.py",),
    ),
    "states: rows that leave take a slot with them": Fault(
        "layers/attention/key_values.py",
        "slots = slots_after(0, length, self.cache",
        "slots = slots_after(0, length - 1, self.cache",
        ("token_mixers/contract/test_joining.py",),
    ),
    "scheduling: prompts do not take turns": Fault(
        "generation/scheduling/scheduler.py",
        "self.rows = deque([*waiting, *served])",
        "self.rows = deque([*served, *waiting])",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: a chunk is larger than it should be": Fault(
        "generation/scheduling/scheduler.py",
        "left -= self._read_parts(parts, left)",
        "left -= self._read_parts(parts, self._step_size)",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: a prompt is read for each request": Fault(
        "generation/scheduling/scheduler.py",
        "other.beginning = row.beginning\n",
        "other.beginning = None\n",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: the last beginning is passed over": Fault(
        "generation/scheduling/requests.py",
        "while part.before is not None and not part.before.is_read:",
        "while part.before is not None and part.before.is_read:",
        ("generation/scheduling/test_prompts.py",),
    ),
    "scheduling: random numbers are drawn twice": Fault(
        "generation/scheduling/writing.py",
        "        self.keys = pairs[:, 0]\n",
        "",
        ("generation/scheduling/test_scheduler.py",),
    ),
    "scheduling: rows change places when others leave": Fault(
        "generation/scheduling/writing.py",
        "back = mx.argsort(mx.array(order))\n            self._tokens",
        "back = mx.array(order)\n            self._tokens",
        ("generation/scheduling",),
    ),
    "scheduling: penalties see no token": Fault(
        "generation/scheduling/writing.py",
        "                group.look_at(self._tokens)",
        "                group.look_at(self._tokens * 0)",
        ("generation/test_batch.py",),
    ),
    "scheduling: an event follows a cancelled request": Fault(
        "generation/scheduling/scheduler.py",
        "            if row.is_over:\n                continue\n            if isinstance",
        "            if isinstance",
        ("generation/scheduling",),
    ),
    "scheduling: a state is kept one token early": Fault(
        "generation/scheduling/scheduler.py",
        "self._unkept.append((row.read[:-1], state))\n        return events",
        "self._unkept.append((row.read, state))\n        return events",
        ("generation/scheduling/test_drafting.py",),
    ),
    "scheduling: what a draft model has read is counted twice": Fault(
        "generation/scheduling/scheduler.py",
        "        self._read += len(tokens)\n",
        "        self._read += 2 * len(tokens)\n",
        ("generation/scheduling/test_drafting.py",),
    ),
}
