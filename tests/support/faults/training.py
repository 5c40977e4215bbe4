"""Faults in `train`: every flag, resume, data, schedules, checkpoints; and in `load_weights`."""

from .fault import Fault

RUN, DATA, SOURCE = (f"commands/training/{name}.py" for name in ("run", "data", "source"))
STREAMING, RECORDS = (f"commands/training/{name}.py" for name in ("streaming", "records"))
CHECKPOINT, SHARDED = (f"commands/training/{name}.py" for name in ("checkpoint", "sharded"))
SETTINGS, FINETUNE = (f"commands/training/{name}.py" for name in ("settings", "finetune"))
MODEL, REPORT = (f"commands/training/{name}.py" for name in ("model", "report"))
TRAIN, OPTIONS = "commands/train.py", "commands/options.py"
LOAD, NAMES, FILES = "weights/load.py", "weights/names.py", "weights/files.py"

_TRAIN, _RESUME = "commands/test_train.py::", "commands/test_resume.py::"
_DATA, _STREAMING = "commands/test_data.py::", "commands/test_streaming.py::"
_WEIGHTS, _HOSTILE = "models/test_weights.py::", "models/test_hostile_weights.py::"
MANUAL = (_TRAIN + "test_a_run_is_what_the_manual_says",)
RESUMED = (_TRAIN + "test_interrupt_and_resume_is_bit_for_bit",)
STREAMED = (_RESUME + "test_resume_of_streamed_images_is_bit_for_bit",)
DEFAULTS = (_TRAIN + "test_defaults_are_those_of_the_manual",)
REACH = (_TRAIN + "test_settings_reach_the_model_and_the_threads",)
SHARES = (_TRAIN + "test_weights_of_shares_sum_to_the_batch",)
BROKEN = (_STREAMING + "test_a_broken_image_counts_nowhere",)
CROPS = (_STREAMING + "test_the_options_reach_the_crops",)
DIGEST = (_STREAMING + "test_the_digest_of_streamed_images",)
NUMBERS = ("commands/test_options.py::test_a_number_out_of_range_is_one_line",)
FULL = (_RESUME + "test_a_disk_that_is_full",)
FILLS = (_RESUME + "test_a_disk_that_fills_in_a_checkpoint",)
RAW = (_RESUME + "test_a_full_disk_is_not_torchs_own_error",)
POISON = (_RESUME + "test_nothing_in_a_checkpoint_is_executed",)
LACKS = (_RESUME + "test_a_checkpoint_that_lacks_something",)
JAX = (_WEIGHTS + "test_jax",)
TRANSFORMERS = (_WEIGHTS + "test_transformers",)
TORCHVISION = (_WEIGHTS + "test_torchvision",)
POSITIONS = (_WEIGHTS + "test_positions_are_resized_as_timm_does",)
REFUSED = (_HOSTILE + "test_hostile_file",)
STATE_DICT = (_HOSTILE + "test_hostile_state_dict",)
REPORTED = (_WEIGHTS + "test_report_names_what_is_missing_and_unexpected",)

FAULTS: list[Fault] = [
    # What a step is.
    Fault(
        "train-no-decay", RUN, "make_optimizer", "no weight decay",
        '"weight_decay": settings.weight_decay', '"weight_decay": 0.0', only=MANUAL,
    ),
    Fault(
        "train-decay-all", RUN, "make_optimizer", "biases and norms decay",
        '"weight_decay": 0.0', '"weight_decay": settings.weight_decay', only=MANUAL,
    ),
    Fault(
        "train-decay-tokens", RUN, "make_optimizer", "tokens and positions decay",
        "p.ndim > 1 and n not in named", "p.ndim > 1", only=MANUAL,
    ),
    Fault(
        "train-warmup-late", RUN, "learning_rate", "the warm-up begins at 0",
        "(step + 1) / warmup", "step / warmup", only=MANUAL,
    ),
    Fault(
        "train-no-warmup", RUN, "learning_rate", "no warm-up", "step < warmup", "False",
        only=MANUAL,
    ),
    Fault(
        "train-warmup-long", RUN, "learning_rate", "a warm-up may outlast the run",
        "min(settings.warmup_epochs, settings.epochs)", "settings.warmup_epochs",
        only=(_TRAIN + "test_a_warm_up_longer_than_the_run",),
    ),
    Fault(
        "train-cosine-shift", RUN, "learning_rate", "the cosine forgets the warm-up",
        "(step - warmup) / total", "step / total", only=MANUAL,
    ),
    Fault(
        "train-cosine-short", RUN, "learning_rate", "the cosine ends late",
        "settings.epochs * steps_per_epoch - warmup", "settings.epochs * steps_per_epoch",
        only=MANUAL,
    ),
    Fault(
        "train-step-late", RUN, "train_epoch", "the schedule is a step ahead",
        "learning_rate(step,", "learning_rate(step + 1,", only=MANUAL,
    ),
    Fault(
        "train-step-stands", RUN, "train_epoch", "the schedule moves by epochs alone",
        "step += 1", "step += 0", only=MANUAL,
    ),
    Fault(
        "train-epoch-late", RUN, "train_epoch", "the schedule is an epoch ahead",
        "(epoch - 1) * self.steps_per_epoch", "epoch * self.steps_per_epoch", only=MANUAL,
    ),
    Fault(
        "train-lr-reported", RUN, "Run.epoch", "the rate in metrics.csv is the next step's",
        "self.steps_per_epoch - 1", "self.steps_per_epoch", only=MANUAL,
    ),
    Fault(
        "train-no-clip", RUN, "", "gradients are not clipped",
        "GRADIENT_NORM = 1.0", "GRADIENT_NORM = 1e6", only=MANUAL,
    ),
    Fault(
        "train-accumulates", RUN, "train_epoch", "gradients add up over the steps",
        "learner.optimizer.zero_grad()", "pass", only=MANUAL,
    ),
    Fault(
        "train-no-smoothing", RUN, "train_epoch", "label smoothing ignored",
        "label_smoothing=smoothing", "label_smoothing=0.0", only=MANUAL,
    ),
    Fault(
        "train-eval-mode", RUN, "train_epoch", "training in eval mode after the first epoch",
        "self.model.train()", "pass", only=MANUAL,
    ),
    Fault(
        "train-evaluates-training", RUN, "evaluate", "evaluation in train mode",
        "self.model.eval()", "self.model.train()", only=MANUAL,
    ),
    Fault(
        "train-smooth-evaluation", RUN, "evaluate", "the held-out loss is smoothed",
        'reduction="sum"', 'reduction="sum", label_smoothing=0.1', only=MANUAL,
    ),
    Fault(
        "train-no-autocast", RUN, "_precision", "--dtype bf16 ignored",
        "if self.autocast is None or self.sharded:", "if True:",
        only=(_TRAIN + "test_bf16_is_of_autocast",),
    ),
    Fault(
        "train-loss-unweighted", RUN, "train_epoch", "the smaller last batch counts as a whole one",
        "loss.detach() * len(labels)", "loss.detach() * self.settings.batch_size", only=MANUAL,
    ),
    # The average.
    Fault(
        "train-ema-turned", RUN, "_follow", "the average follows with 1 - DECAY",
        "get_ema_multi_avg_fn(self.settings.ema)", "get_ema_multi_avg_fn(1 - self.settings.ema)",
        only=MANUAL,
    ),
    Fault(
        "train-ema-still", RUN, "train_epoch", "the average never moves",
        "self._follow()", "pass", only=MANUAL,
    ),
    Fault(
        "train-ema-frozen", RUN, "_follow", "with --freeze the average takes other weights",
        "[self.learners[0].parameters[name] for name in self.average]",
        "list(self.learners[0].parameters.values())[: len(self.average)]",
        only=(_TRAIN + "test_an_average_of_what_is_trained",),
    ),
    Fault(
        "train-ema-unseen", RUN, "Run.epoch", "the held-out figures are not the average's",
        "nullcontext() if learner.name else self.averaged()", "nullcontext()", only=MANUAL,
    ),
    Fault(
        "train-ema-stays", RUN, "averaged", "the average takes the place of the weights for good",
        "for name, value in kept.items():", "for name, value in self.average.items():",
        only=(_TRAIN + "test_the_average_leaves_as_it_came",),
    ),
    Fault(
        "train-ema-not-saved", RUN, "save", "a checkpoint without the average",
        'content["average"] = self.average', "pass", only=RESUMED,
    ),
    Fault(
        "train-ema-not-restored", RUN, "_restore_whole", "the average not restored on resume",
        'value.copy_(content["average"][name])', "pass", only=RESUMED,
    ),
    Fault(
        "train-mixup-off", RUN, "_mixup", "--mixup ignored", "if not self.settings.mixup:",
        "if True:", only=(_STREAMING + "test_mixup_and_average",),
    ),
    # Resume.
    Fault(
        "train-optimizer-not-restored", RUN, "_restore_whole", "AdamW's state begins anew",
        'self.learners[0].optimizer.load_state_dict(content["optimizer"])', "pass", only=RESUMED,
    ),
    Fault(
        "train-rng-not-restored", RUN, "_restore_whole", "dropped paths begin anew",
        'checkpoint.set_rng_state(content["rng"])', "pass", only=RESUMED,
    ),
    Fault(
        "train-history-lost", RUN, "restore", "the history begins anew",
        'self.history = content["history"]', "self.history = []", only=RESUMED,
    ),
    Fault(
        "train-reference-not-restored", RUN, "_restore_whole", "the plain model begins anew",
        'parameter.copy_(content["reference"][name])', "pass", only=RESUMED,
    ),
    Fault(
        "train-reference-optimizer", RUN, "_restore_whole", "the plain model's AdamW begins anew",
        'learner.optimizer.load_state_dict(content["reference_optimizer"])', "pass", only=RESUMED,
    ),
    Fault(
        "train-skips-an-epoch", TRAIN, "_train", "a resumed run leaves an epoch out",
        "range(done + 1,", "range(done + 2 if done else 1,", only=RESUMED,
    ),
    Fault(
        "train-saves-late", TRAIN, "_train", "no checkpoint after the last epoch",
        "run.save()", "run.save() if epoch < settings.epochs else None", only=FILLS,
    ),
    Fault(
        "train-python-rng", CHECKPOINT, "set_rng_state", "python's generator is not restored",
        'random.setstate(state["python"])', "pass",
        only=(_RESUME + "test_the_random_states_are_all_restored",),
    ),
    Fault(
        "train-numpy-rng", CHECKPOINT, "set_rng_state", "numpy's generator is not restored",
        "np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))", "pass",
        only=(_RESUME + "test_the_random_states_are_all_restored",),
    ),
    Fault(
        "train-torch-rng", CHECKPOINT, "set_rng_state", "torch's generator is not restored",
        'torch.set_rng_state(state["torch"])', "pass",
        only=(_RESUME + "test_the_random_states_are_all_restored",),
    ),
    Fault(
        "train-resume-any-data", RUN, "restore", "data may differ on resume",
        'if content["data_digest"] != self.source.digest():', "if False:",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-labels", SOURCE, "digest", "other labels are the same data",
        "digest.update(split.labels.cpu().numpy().tobytes())", "pass",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-held-out", SOURCE, "digest", "other held-out images are the same data",
        "for split in (self.train, self.held_out):", "for split in (self.train,):",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-classes", SOURCE, "digest", "other classes are the same data",
        "hashlib.sha256(repr(self.classes).encode())", "hashlib.sha256()",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-sizes", RECORDS, "Files.content", "files of another size are the same data",
        "path.stat().st_size", "0", only=DIGEST,
    ),
    Fault(
        "train-digest-names", RECORDS, "Files.content", "files of another name are the same data",
        "(str(path), path", '("", path', only=DIGEST,
    ),
    Fault(
        "train-resume-other-options", "commands/training/folder.py", "_resumed_settings",
        "--resume takes an option that differs", "if value != getattr(settings, name):",
        "if False:", only=(_TRAIN + "test_runs_never_overwrite_each_other",),
    ),
    Fault(
        "train-overwrites", "commands/training/folder.py", "open_run",
        "--out takes a folder that holds a run", "    if taken:", "    if False:",
        only=(_TRAIN + "test_runs_never_overwrite_each_other",),
    ),
    # Files: whole, refused, named.
    Fault(
        "train-not-atomic", CHECKPOINT, "write_atomically", "a file is written in its place",
        'temporary = path.with_name(f".{path.name}.tmp")', "temporary = path",
        only=(_TRAIN + "test_a_failed_write_leaves_the_old_file",),
    ),
    Fault(
        "train-no-fsync", CHECKPOINT, "write_atomically", "renamed before it is on the disk",
        "os.fsync(file.fileno())", "pass",
        only=(_RESUME + "test_a_file_is_on_the_disk_before_it_takes_its_name",),
    ),
    Fault(
        "train-tmp-left", CHECKPOINT, "write_atomically", "half of a file stays",
        "temporary.unlink(missing_ok=True)", "pass", only=FILLS,
    ),
    Fault(
        "train-full-disk-raw", CHECKPOINT, "write_atomically", "torch.save's own error comes out",
        "OSError | RuntimeError", "OSError", only=RAW,
    ),
    Fault(
        "train-full-disk-reason", CHECKPOINT, "unwritten", "the system's reason is lost",
        "cause = cause.__cause__ or cause.__context__", "cause = None", only=RAW,
    ),
    Fault(
        "train-full-disk-silent", TRAIN, "_run", "a full disk does not say how to go on",
        'raise CommandError(f"{error}. {_how_far(folder, settings, processes)}") from error',
        "raise", only=FULL,
    ),
    Fault(
        "train-system-error", "commands/cli.py", "main", "an OSError is a traceback",
        "except (CommandError, OSError) as error:", "except CommandError as error:",
        only=(_RESUME + "test_an_error_of_the_system_is_one_line",),
    ),
    Fault(
        "train-full-disk-coverage", "commands/coverage.py", "write_table",
        "a full disk loses the former table", "write_text(out, ", "out.write_text(",
        only=(_RESUME + "test_a_disk_that_is_full_elsewhere",),
    ),
    Fault(
        "train-full-disk-shards", SHARDED, "save", "a full disk of shards: torch's own error",
        "except (OSError, dcp.CheckpointException) as error:", "except OSError as error:",
        only=(_RESUME + "test_a_disk_that_fills_in_a_sharded_checkpoint",),
    ),
    Fault(
        "train-older-shards-first", SHARDED, "save", "the older shards go before the newer come",
        "    try:", "    remove_all(folder)\n    try:",
        only=(_RESUME + "test_a_disk_that_fills_in_a_sharded_checkpoint",),
    ),
    Fault(
        "train-pickle-metadata", SHARDED, "load", ".metadata is read with pickle",
        "_Reader(path)", "dcp.FileSystemReader(path)", only=POISON,
    ),
    Fault(
        "train-pickle-any-name", SHARDED, "find_class", "what .metadata names is called",
        "if dtype or name in _NAMED.get(module, ()):", "if True:", only=POISON,
    ),
    Fault(
        "train-pickle-entries", SHARDED, "", "entries that are no tensors are read with pickle",
        '"ChunkStorageMetadata",', '"ChunkStorageMetadata", "BytesStorageMetadata",', only=POISON,
    ),
    Fault(
        "train-pickle-checkpoint", CHECKPOINT, "load", "a checkpoint is read with pickle",
        "content = read_pickle(path)", "content = torch.load(path, weights_only=False)",
        only=(*POISON, _HOSTILE + "test_no_source_reads_a_file_that_could_run_code"),
    ),
    Fault(
        "train-parts-unchecked", CHECKPOINT, "load", "a checkpoint that lacks its history is taken",
        "sorted(PARTS - content.keys())", "[]", only=LACKS,
    ),
    Fault(
        "train-settings-unchecked", SETTINGS, "read_settings", "unknown settings are a traceback",
        "as a checkpoint\", TypeError):", "as a checkpoint\", OSError):", only=LACKS,
    ),
    Fault(
        "train-damaged-raw", RUN, "restore", "a checkpoint without the model is a traceback",
        "damaged = (KeyError, ", "damaged = (", only=LACKS,
    ),
    # Data.
    Fault(
        "train-normalize-held-out", SOURCE, "InMemory.__init__",
        "normalization computed with the held-out images in it",
        "Normalization.of(dataset.train.images)",
        "Normalization.of(torch.cat([dataset.train.images, dataset.held_out.images]))",
        only=MANUAL,
    ),
    Fault(
        "train-normalize-streamed", STREAMING, "Streamed.__init__",
        "streamed images are normalized by held-out ones",
        "self._read(self._train_images, places)", "self._read(self._held_out_images, places)",
        only=(_STREAMING + "test_streamed_images_are_normalized_by_those_of_training",),
    ),
    Fault(
        "train-zoom", DATA, "Augmentation.apply", "the zoom is twice as large",
        "1 + draw[1] * self.zoom", "1 + 2 * draw[1] * self.zoom",
        only=(_DATA + "test_augmentation_zooms_by_the_share_that_it_says",),
    ),
    Fault(
        "train-shift-y", DATA, "Augmentation.apply", "no shift along y",
        "shift_y = draw[2] * 2 * self.shift / width, draw[3] * 2 * self.shift / height",
        "shift_y = draw[2] * 2 * self.shift / width, 0 * draw[3]",
        only=(_DATA + "test_augmentation_identity_shift_and_mirror",),
    ),
    Fault(
        "train-shift-half", DATA, "Augmentation.apply", "the shift along x is half as large",
        "draw[2] * 2 * self.shift", "draw[2] * self.shift",
        only=(_DATA + "test_augmentation_identity_shift_and_mirror",),
    ),
    Fault(
        "train-degrees", DATA, "Augmentation.apply", "degrees taken for radians",
        "math.radians(self.degrees)", "self.degrees",
        only=(_DATA + "test_augmentation_rotates_without_shearing",),
    ),
    Fault(
        "train-one-draw", DATA, "draw", "all images of a batch draw one map",
        "torch.rand(5, B, generator=generator)",
        "torch.rand(5, 1, generator=generator).expand(5, B)",
        only=(_DATA + "test_each_image_draws_its_own_map",),
    ),
    Fault(
        "train-draw-positive", DATA, "draw", "maps turn, zoom and shift one way alone",
        "2 * torch.rand(5, B, generator=generator) - 1", "torch.rand(5, B, generator=generator)",
        only=(_DATA + "test_each_image_draws_its_own_map",),
    ),
    Fault(
        "train-augmentations", SOURCE, "", "digits turn by 15 degrees",
        'Augmentation(degrees=5, zoom=0.1, shift=0.5)',
        'Augmentation(degrees=15, zoom=0.1, shift=0.5)',
        only=(_TRAIN + "test_augmentations_are_those_of_the_manual",),
    ),
    Fault(
        "train-no-augment", SOURCE, "InMemory.batches", "--no-augment ignored",
        "if self.settings.augment else None", "", only=MANUAL,
    ),
    Fault(
        "train-never-augments", SOURCE, "InMemory.batches", "images are never augmented",
        "if draw is not None:", "if False:", only=MANUAL,
    ),
    Fault(
        "train-same-epochs", SOURCE, "InMemory.batches", "each epoch has the same batches",
        "self.settings.seed * 1_000_003 + epoch", "self.settings.seed * 1_000_003 + 1", only=MANUAL,
    ),
    Fault(
        "train-order-seed", SOURCE, "InMemory.batches", "--seed does not reach the order",
        "self.settings.seed * 1_000_003 + epoch", "epoch",
        only=(_TRAIN + "test_the_seed_draws_weights_split_and_order",),
    ),
    Fault(
        "train-weights-seed", RUN, "Run.__init__", "--seed does not reach the weights",
        "torch.manual_seed(settings.seed)", "torch.manual_seed(0)",
        only=(_TRAIN + "test_the_seed_draws_weights_split_and_order",),
    ),
    Fault(
        "train-split-seed", DATA, "load", "--seed does not reach the split",
        "load_digits(settings.img_size, settings.held_out, settings.seed)",
        "load_digits(settings.img_size, settings.held_out, 0)",
        only=(_TRAIN + "test_the_seed_draws_weights_split_and_order",),
    ),
    Fault(
        "train-split-overlaps", DATA, "stratified_split", "held-out images are trained on",
        "return (~mask).nonzero()[:, 0]", "return torch.arange(len(mask))",
        only=(_DATA + "test_digits_split_is_stratified_fixed_by_seed_and_disjoint",),
    ),
    Fault(
        "train-last-batch", SOURCE, "InMemory.batches", "the smaller last batch is left out",
        "for index in order.split(self.settings.batch_size):",
        "for index in order[: len(order) // self.settings.batch_size * self.settings.batch_size]"
        ".split(self.settings.batch_size):",
        only=(_TRAIN + "test_batches_cover_every_image_once_and_depend_on_the_epoch_alone",),
    ),
    Fault(
        "train-share-weight", SOURCE, "InMemory.batches", "a share weighs as its batch",
        "(mine.stop - mine.start) * processes.world / len(index)", "1.0", only=SHARES,
    ),
    Fault(
        "train-share-held-out", SOURCE, "held_out_batches", "each process evaluates all images",
        "mine = index[processes.share(len(index))]", "mine = index", only=SHARES,
    ),
    Fault(
        "train-upright", DATA, "upright", "EXIF's turn is ignored",
        'require("PIL.ImageOps", "pillow").exif_transpose(opened)', "opened",
        only=(_DATA + "test_images_are_cropped_about_their_centre_and_turned_upright",),
    ),
    Fault(
        "train-sixteen-bits", DATA, "upright", "images of 16 bits are cut to 8",
        'image.mode.startswith(("I", "F"))', "False",
        only=(_DATA + "test_images_are_cropped_about_their_centre_and_turned_upright",),
    ),
    Fault(
        "train-squeezed", DATA, "fit", "a wide image is squeezed, not cropped",
        ".fit(image, (img_size, img_size), bicubic)",
        ".pad(image.resize((img_size, img_size)), (img_size, img_size), bicubic)",
        only=(_DATA + "test_images_are_cropped_about_their_centre_and_turned_upright",),
    ),
    Fault(
        "train-broken-weighs", STREAMING, "Streamed.batches", "a broken image weighs as read",
        "len(labels) * processes.world / len(batch)", "1.0 * processes.world", only=BROKEN,
    ),
    Fault(
        "train-broken-counted", RUN, "evaluate", "a broken image counts as held out and read",
        "max(int((predicted >= 0).sum()), 1)", "max(len(predicted), 1)", only=BROKEN,
    ),
    Fault(
        "train-broken-wrong", RUN, "Run.epoch", "a broken image counts as wrong",
        "(predicted == self.source.held_out_labels)[predicted >= 0]",
        "(predicted == self.source.held_out_labels)", only=BROKEN,
    ),
    Fault(
        "train-broken-goes-on", STREAMING, "_read", "--on-error stop goes on", "if not self.skip:",
        "if False:", only=(_STREAMING + "test_a_broken_image_names_itself",),
    ),
    Fault(
        "train-crop-scale", STREAMING, "training_transforms", "--crop-scale ignored",
        "(settings.crop_scale, 1.0)", "(0.08, 1.0)", only=CROPS,
    ),
    Fault(
        "train-randaugment", STREAMING, "training_transforms", "--randaugment's M ignored",
        "v2.RandAugment(magnitude=settings.randaugment)", "v2.RandAugment()", only=CROPS,
    ),
    Fault(
        "train-crop-once", STREAMING, "Streamed.batches", "an image is cropped alike in all epochs",
        "first = base * self.train_count % 2**62", "first = self.train_count",
        only=(_STREAMING + "test_a_crop_is_random_and_reading_leaves_the_generator_alone",),
    ),
    # Flags.
    Fault(
        "train-nan", OPTIONS, "positive", "a number above 0 may be NaN",
        "0 < value <= most", "not value <= 0 and not value > most", only=NUMBERS,
    ),
    Fault(
        "train-huge", OPTIONS, "positive", "any size is taken", "0 < value <= most", "0 < value",
        only=NUMBERS,
    ),
    Fault(
        "train-zero", OPTIONS, "positive", "0 is above 0", "0 < value", "0 <= value", only=NUMBERS,
    ),
    Fault(
        "train-negative", OPTIONS, "within", "less than the least is taken",
        "least <= value <= most", "value <= most", only=NUMBERS,
    ),
    Fault(
        "train-share-one", OPTIONS, "", "--label-smoothing 1 is taken",
        "0 <= value < 1", "0 <= value <= 1", only=NUMBERS,
    ),
    Fault(
        "train-part-zero", OPTIONS, "", "--held-out 0 is taken", "0 < value < 1", "0 <= value < 1",
        only=NUMBERS,
    ),
    Fault(
        "train-threads", TRAIN, "_run", "--threads ignored",
        "if settings.threads is not None:", "if False:", only=REACH,
    ),
    Fault(
        "train-drop-path", MODEL, "model_of", "--drop-path ignored",
        'options["drop_path_rate"] = settings.drop_path', "pass", only=REACH,
    ),
    Fault(
        "train-lora-rank", FINETUNE, "add_lora", "--lora's rank ignored",
        "LoraConfig(r=rank,", "LoraConfig(r=8,",
        only=("commands/test_finetune.py::test_lora_on_a_swapped_model_of_the_disk",),
    ),
    Fault(
        "train-freeze", FINETUNE, "freeze", "--freeze ignored",
        "named[name].requires_grad_(False)", "pass",
        only=("commands/test_finetune.py::test_a_frozen_backbone",),
    ),
    Fault(
        "train-lora-unmerged", FINETUNE, "merged", "weights.pth without what LoRA learnt",
        "module.merge()", "pass",
        only=("commands/test_finetune.py::test_lora_on_a_swapped_model_of_the_disk",),
    ),
    Fault(
        "train-weights-head", FINETUNE, "load_into", "weights that lack a layer are taken",
        "if not HEAD.search(n)]:\n        raise", "if False]:\n        raise",
        only=("commands/test_finetune.py::test_weights_that_do_not_fit_change_nothing",),
    ),
    Fault(
        "train-defaults-warmup", SETTINGS, "", "the digits warm up for 2 epochs",
        "lr=2e-3, warmup_epochs=4, threads=1", "lr=2e-3, warmup_epochs=2, threads=1", only=DEFAULTS,
    ),
    Fault(
        "train-defaults-smoothing", SETTINGS, "", "labels are not smoothed by default",
        "label_smoothing: float = 0.1", "label_smoothing: float = 0.0", only=DEFAULTS,
    ),
    Fault(
        "train-no-check", TRAIN, "_checked", "a kernel that breaks the 2x rule is trained with",
        "if all(e.passed for e in errors):", "if True:",
        only=(_TRAIN + "test_a_broken_kernel_stops_the_training",),
    ),
    Fault(
        "train-confusion", REPORT, "confusion_matrix", "rows are the predicted classes",
        "labels * num_classes + predicted", "predicted * num_classes + labels",
        only=(_TRAIN + "test_rows_of_the_confusion_matrix_are_true_classes",),
    ),
    Fault(
        "train-infinite", RUN, "Run.epoch", "a loss that is not finite goes on",
        "self.processes.agree(lambda: self._refuse_infinite(row))", "pass",
        only=(_TRAIN + "test_a_loss_that_is_not_finite_keeps_the_last_checkpoint",),
    ),
    # load_weights.
    Fault(
        "weights-qkv-order", NAMES, "_pack_qkv", "queries and keys change places",
        'names = [match.expand(rf"\\1.{part}.\\2") for part in "qkv"]',
        'names = [match.expand(rf"\\1.{part}.\\2") for part in "kqv"]', only=TRANSFORMERS,
    ),
    Fault(
        "weights-jax-patches", NAMES, "_from_flax", "JAX patches are turned",
        "x.permute(3, 2, 0, 1)", "x.permute(3, 2, 1, 0)", only=JAX,
    ),
    Fault(
        "weights-jax-matrix", NAMES, "_from_flax", "columns of a JAX patch matrix in another order",
        "x.unflatten(0, (height, width, in_chans))",
        "x.unflatten(0, (in_chans, height, width)).permute(1, 2, 0, 3)",
        only=(_WEIGHTS + "test_jax_patches_as_a_matrix",),
    ),
    Fault(
        "weights-jax-heads", NAMES, "_from_flax", "JAX queries are not transposed",
        "x.flatten(1).t()", "x.flatten(1)", only=JAX,
    ),
    Fault(
        "weights-jax-out", NAMES, "_from_flax", "JAX output projections are not transposed",
        "x.flatten(0, -2).t() if", "x.flatten(0, -2).t().clone().view(x.shape[-1], -1) if"
        " x.ndim == 2 else x.flatten(0, -2) if", only=JAX,
    ),
    Fault(
        "weights-jax-stacked", NAMES, "_from_flax", "stacked layers come in reverse",
        "enumerate(x)", "enumerate(x.flip(0))", only=JAX,
    ),
    Fault(
        "weights-jax-norms", NAMES, "", "big_vision's second norm is not known",
        r'LayerNorm_[12]', r'LayerNorm_2', only=JAX,
    ),
    Fault(
        "weights-torchvision-norms", NAMES, "", "torchvision's norms change places",
        r'_TV_LAYER + r"ln_([12])\.(\w+)": r"blocks.\1.norm\2.\3"',
        r'_TV_LAYER + r"ln_1\.(\w+)": r"blocks.\1.norm2.\2",'
        "\n    "
        r'_TV_LAYER + r"ln_2\.(\w+)": r"blocks.\1.norm1.\2"', only=TORCHVISION,
    ),
    Fault(
        "weights-transformers-norms", NAMES, "", "transformers' norms change places",
        r'layernorm_before|norm1|rms_norm1)\.(\w+)": r"blocks.\1.norm1.\2"',
        r'layernorm_before|norm1|rms_norm1)\.(\w+)": r"blocks.\1.norm2.\2"', only=TRANSFORMERS,
    ),
    Fault(
        "weights-transformers-old", NAMES, "", "names from before transformers 5.9 are not known",
        r"attention\.(?:attention\.query|q_proj)", r"attention\.(?:q_proj)", only=TRANSFORMERS,
    ),
    Fault(
        "weights-gate", NAMES, "", "the gate and what it multiplies change places",
        r'(?:mlp|ffn)\.gate_proj\.(\w+)": r"blocks.\1.mlp.fc1_g.\2"',
        r'(?:mlp|ffn)\.gate_proj\.(\w+)": r"blocks.\1.mlp.fc1_x.\2"',
        only=(_WEIGHTS + "test_names_of_gated_mlps",),
    ),
    Fault(
        "weights-positions-mode", "models/positions.py", "", "positions resized without antialias",
        "antialias=True", "antialias=False", only=POSITIONS,
    ),
    Fault(
        "weights-positions-prefix", LOAD, "_fit_positions", "prefix positions taken for patches",
        "for prefix in (wanted, 0, 1):", "for prefix in (0, wanted, 1):",
        only=(_WEIGHTS + "test_positions_of_prefix_tokens_are_kept",),
    ),
    Fault(
        "weights-positions-class", LOAD, "_fit_positions", "the class position is dropped",
        'tensors["cls_token"] = tensors["cls_token"] + positions', "pass",
        only=(_WEIGHTS + "test_positions_without_and_with_the_class_token_are_one_function",),
    ),
    Fault(
        "weights-positions-zeros", LOAD, "_fit_positions", "missing prefix positions are ones",
        "pos_embed.new_zeros(1, wanted", "pos_embed.new_ones(1, wanted",
        only=(_WEIGHTS + "test_positions_without_and_with_the_class_token_are_one_function",),
    ),
    Fault(
        "weights-grid-size", LOAD, "_fit_positions", "grid_size ignored",
        "old = grid_size or (", "old = (",
        only=(_WEIGHTS + "test_positions_of_a_grid_that_is_not_square",),
    ),
    Fault(
        "weights-half-written", LOAD, "_load", "weights are written before all are checked",
        "converted = {name: _converted(name, tensors[name], targets[name]) for name in loaded}",
        "converted = {}\n        for name in loaded:\n"
        "            converted[name] = _converted(name, tensors[name], targets[name])\n"
        "            targets[name].copy_(converted[name])", only=STATE_DICT,
    ),
    Fault(
        "weights-not-finite", LOAD, "_converted", "NaN is loaded",
        "if not converted.isfinite().all():", "if False:", only=STATE_DICT,
    ),
    Fault(
        "weights-shapes", LOAD, "_check_shapes", "shapes that broadcast are taken",
        "if got == wanted:", "if len(got) <= len(wanted) and got[-1] == wanted[-1]:",
        only=(_WEIGHTS + "test_rejects_and_leaves_the_model_as_it_was",),
    ),
    Fault(
        "weights-kind", LOAD, "_check_shapes", "integers are taken for weights",
        "if target.is_floating_point() != tensors[name].is_floating_point():", "if False:",
        only=STATE_DICT,
    ),
    Fault(
        "weights-dtype", LOAD, "_converted", "numbers that the dtype cannot hold are taken",
        "if not converted.isfinite().all():", "if not source.isfinite().all():",
        only=(_HOSTILE + "test_a_number_too_large_for_the_model_is_refused",),
    ),
    Fault(
        "weights-report-missing", LOAD, "_load", "the report names nothing as missing",
        "missing=_natural(targets.keys() - tensors.keys())", "missing=()", only=REPORTED,
    ),
    Fault(
        "weights-report-unexpected", LOAD, "_load", "the report names nothing as unexpected",
        "unexpected=_natural(tensors.keys() - targets.keys())", "unexpected=()", only=REPORTED,
    ),
    Fault(
        "weights-report-resized", LOAD, "_load", "the report gives the new shape for the old",
        "n: (before[n], s)", "n: (s, s)", only=POSITIONS,
    ),
    Fault(
        "weights-report-order", LOAD, "_natural", "block 10 comes before block 2",
        "(len(s) if s.isdecimal() else 0, s)", "(0, s)", only=REPORTED,
    ),
    Fault(
        "weights-key-bias", LOAD, "_fit_biases", "a bias of keys is dropped in silence",
        "if mask not in tensors and k.any():", "if False:",
        only=("models/test_rope_models.py",),
    ),
    Fault(
        "weights-joined-bias", LOAD, "_fit_biases", "the values' bias goes to the keys",
        "torch.cat((q, torch.zeros_like(q), v))", "torch.cat((q, v, torch.zeros_like(q)))",
        only=("models/test_rope_models.py",),
    ),
    Fault(
        "weights-two-keys", NAMES, "add", "the later of two keys of one meaning wins",
        "if name in tensors:", "if False:", only=STATE_DICT,
    ),
    Fault(
        "weights-wrapped", NAMES, "_unwrap", "names of torch.compile are not known",
        "module|_orig_mod|", "module|", only=(_WEIGHTS + "test_wrappers",),
    ),
    Fault(
        "weights-pickle", FILES, "read_pickle", "a file of weights runs code",
        "weights_only=True", "weights_only=False", only=REFUSED,
    ),
    Fault(
        "weights-numpy-pickle", FILES, "_read_npz", "an .npz of objects is read",
        "if dtype.hasobject:", "if False:",
        only=(_HOSTILE + "test_hostile_file[objects.npz]",),
    ),
    Fault(
        "weights-bomb", FILES, "_check_archive", "an archive may unpack to any size",
        "if unpacked > max(MAX_RATIO * size, UNPACKED_FREELY):", "if False:", only=REFUSED,
    ),
    Fault(
        "weights-header", FILES, "_read_npz", "an array's header is believed",
        "or math.prod(shape) * dtype.itemsize != held", "", only=REFUSED,
    ),
]  # fmt: skip
