"""Faults in `train`: every flag, resume, data, schedules, checkpoints; and in `load_weights`."""

from .fault import Fault

RUN, DATA, SETTINGS = (f"commands/training/{name}.py" for name in ("run", "data", "settings"))
STREAMING, RECORDS = (f"commands/training/{name}.py" for name in ("streaming", "records"))
WHOLE_FILES = "runtime/files.py"
CHECKPOINT = "commands/training/checkpoint.py"
MODEL, REPORT = (f"commands/training/{name}.py" for name in ("model", "report"))
PROCESSES, FIGURES = (f"commands/training/{name}.py" for name in ("processes", "figures"))
MODELS, PROBE = "commands/models.py", "commands/probe.py"
TRAIN, OPTIONS = "commands/train.py", "commands/options.py"
LOAD, NAMES, FILES = "weights/load.py", "weights/names.py", "weights/files.py"

_TRAIN, _RESUME = "commands/test_train.py::", "commands/test_resume.py::"
_DATA, _STREAMING = "commands/test_data.py::", "commands/test_streaming.py::"
_FINETUNE, _PROBE = "commands/test_finetune.py::", "commands/test_probe.py::"
_REPORT, _RECORDS = "commands/test_report.py::", "commands/test_records.py::"
_DISTRIBUTED = "commands/test_train_distributed.py::"
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
        "lambda step: learning_rate(step,", "lambda step: learning_rate(step + 1,", only=MANUAL,
    ),
    Fault(
        "train-step-stands", RUN, "train_epoch", "the schedule moves by epochs alone",
        "schedule.step()", "pass", only=MANUAL,
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
        "learner.model.train()", "pass", only=MANUAL,
    ),
    Fault(
        "train-evaluates-training", RUN, "evaluate", "evaluation in train mode",
        "model.eval()", "model.train()", only=MANUAL,
    ),
    Fault(
        "train-smooth-evaluation", RUN, "evaluate", "the held-out loss is smoothed",
        'reduction="sum"', 'reduction="sum", label_smoothing=0.1', only=MANUAL,
    ),
    Fault(
        "train-no-autocast", RUN, "_precision", "--dtype bf16 ignored",
        "self.autocast is not None and not self.sharded", "False",
        only=(_TRAIN + "test_bf16_is_of_autocast",),
    ),
    Fault(
        "train-loss-unweighted", RUN, "train_epoch", "the smaller last batch counts as a whole one",
        "loss.detach() * len(labels)", "loss.detach() * self.settings.batch_size", only=MANUAL,
    ),
    # The average.
    Fault(
        "train-ema-turned", RUN, "Run.__init__", "the average follows with 1 - DECAY",
        'get_ema_multi_avg_fn(settings.ema)',
        'get_ema_multi_avg_fn(1 - settings.ema)',
        only=MANUAL,
    ),
    Fault(
        "train-ema-still", RUN, "train_epoch", "the average never moves",
        'learner.average.update_parameters(learner.model)',
        'pass',
        only=MANUAL,
    ),
    Fault(
        "train-ema-first", RUN, "Run.__init__", "the average begins with the first step's weights",
        'average.n_averaged += 1',
        'pass',
        only=(_TRAIN + "test_an_average_begins_with_the_first_weights",),
    ),
    Fault(
        "train-ema-unseen", RUN, "evaluated", "the held-out figures are not the average's",
        'if self.average is None:',
        'if True:',
        only=MANUAL,
    ),
    Fault(
        "train-ema-not-saved", RUN, "Learner.state", "a checkpoint without the average",
        'state["average"] = whole_weights(self.average.module)',
        'pass',
        only=RESUMED,
    ),
    Fault(
        "train-ema-not-restored", RUN, "Learner.restore", "the average not restored on resume",
        'models["average"] = self.average.module',
        'pass',
        only=RESUMED,
    ),
    Fault(
        "train-mixup-off", RUN, "_mixup", "--mixup ignored", "if not self.settings.mixup:",
        "if True:", only=(_STREAMING + "test_mixup_and_average",),
    ),
    # Resume.
    Fault(
        "train-optimizer-not-restored", RUN, "Learner.restore", "AdamW's state begins anew",
        'self.optimizer.state[parameter][key] = value',
        'pass',
        only=RESUMED,
    ),
    Fault(
        "train-rng-not-restored", RUN, "Run.restore", "dropped paths begin anew",
        'checkpoint.set_rng_state(content["rng"])',
        'pass',
        only=RESUMED,
    ),
    Fault(
        "train-history-lost", RUN, "Run.restore", "the history begins anew",
        'self.history = content["history"]', "self.history = []", only=RESUMED,
    ),
    Fault(
        "train-reference-not-restored", RUN, "Learner.restore", "the plain model begins anew",
        'for part, model in models.items():',
        'for part, model in () if self.name else models.items():',
        only=RESUMED,
    ),
    Fault(
        "train-reference-optimizer", RUN, "Learner.restore", "the plain model's AdamW begins anew",
        'in content[f"{self.name}optimizer"].items():',
        'in {} if self.name else content["optimizer"].items():',
        only=RESUMED,
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
        "train-resume-any-data", RUN, "Run.restore", "data may differ on resume",
        'if content["data_digest"] != self.source.digest():', "if False:",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-labels", DATA, "digest", "other labels are the same data",
        "for tensor in (*self.train, *self.held_out):",
        "for tensor in (self.train.images, self.held_out.images):",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-held-out", DATA, "digest", "other held-out images are the same data",
        "for tensor in (*self.train, *self.held_out):", "for tensor in self.train:",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-classes", DATA, "digest", "other classes are the same data",
        "hashlib.sha256(repr(self.classes).encode())", "hashlib.sha256()",
        only=(_RESUME + "test_resume_compares_all_of_the_data",),
    ),
    Fault(
        "train-digest-sizes", RECORDS, "_files", "files of another size are the same data",
        'path.stat().st_size',
        '0',
        only=DIGEST,
    ),
    Fault(
        "train-digest-names", RECORDS, "Records.digest", "files of another name are the same data",
        "content = self.origin, self.places, self.labels",
        "content = [place[2:] for place in self.places], self.labels",
        only=DIGEST,
    ),
    Fault(
        "train-resume-other-options", CHECKPOINT, "_resumed_settings",
        "--resume takes an option that differs", "if value != getattr(settings, name):",
        "if False:", only=(_TRAIN + "test_runs_never_overwrite_each_other",),
    ),
    Fault(
        "train-overwrites", CHECKPOINT, "open_run",
        "--out takes a folder that holds a run", "for n in WRITTEN if", "for n in () if",
        only=(_TRAIN + "test_runs_never_overwrite_each_other",),
    ),
    # Files: whole, refused, named.
    Fault(
        "train-not-atomic", WHOLE_FILES, "write_atomically", "a file is written in its place",
        'temporary = path.with_name(f".{path.name}.tmp")', "temporary = path",
        only=(_TRAIN + "test_a_failed_write_leaves_the_old_file",),
    ),
    Fault(
        "train-no-fsync", WHOLE_FILES, "write_atomically", "renamed before it is on the disk",
        "os.fsync(file.fileno())", "pass",
        only=(_RESUME + "test_a_file_is_on_the_disk_before_it_takes_its_name",),
    ),
    Fault(
        "train-tmp-left", WHOLE_FILES, "write_atomically", "half of a file stays",
        "temporary.unlink(missing_ok=True)", "pass", only=FILLS,
    ),
    Fault(
        "train-full-disk-raw", WHOLE_FILES, "write_atomically", "torch.save's own error comes out",
        "OSError | RuntimeError", "OSError", only=RAW,
    ),
    Fault(
        "train-full-disk-reason", WHOLE_FILES, "unwritten", "the system's reason is lost",
        "cause = cause.__cause__ or cause.__context__", "cause = None", only=RAW,
    ),
    Fault(
        "train-full-disk-silent", TRAIN, "_run", "a full disk does not say how to go on",
        'raise CommandError(f"{error}. {training.how_far()}") from error',
        "raise", only=FULL,
    ),
    Fault(
        "train-system-error", "commands/cli.py", "main", "an OSError is a traceback",
        "except (CommandError, OSError) as error:", "except CommandError as error:",
        only=(_RESUME + "test_an_error_of_the_system_is_one_line",),
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
        "train-settings-unchecked", CHECKPOINT, "read_settings", "unknown settings are a traceback",
        "as a checkpoint\", TypeError):", "as a checkpoint\", OSError):", only=LACKS,
    ),
    Fault(
        "train-damaged-raw", RUN, "Run.restore", "a checkpoint without the model is a traceback",
        "damaged = (KeyError, ", "damaged = (", only=LACKS,
    ),
    # Data.
    Fault(
        "train-normalize-held-out", DATA, "InMemory.__init__",
        "normalization computed with the held-out images in it",
        "Normalization.of(images)",
        "Normalization.of(torch.cat([images, rest]))",
        only=MANUAL,
    ),
    Fault(
        "train-normalize-streamed", STREAMING, "Streamed.__init__",
        "streamed images are normalized by held-out ones",
        "self._read(self.train, places)", "self._read(self.held_out, places)",
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
        "train-augmentations", DATA, "", "digits turn by 15 degrees",
        'Augmentation(degrees=5, zoom=0.1, shift=0.5)',
        'Augmentation(degrees=15, zoom=0.1, shift=0.5)',
        only=(_TRAIN + "test_augmentations_are_those_of_the_manual",),
    ),
    Fault(
        "train-no-augment", DATA, "InMemory._shown", "--no-augment ignored",
        "generator is not None and self.settings.augment", "generator is not None", only=MANUAL,
    ),
    Fault(
        "train-never-augments", DATA, "InMemory._shown", "images are never augmented",
        "if draw is not None and len(numbers):", "if False:", only=MANUAL,
    ),
    Fault(
        "train-same-epochs", DATA, "Batches.batches", "each epoch has the same batches",
        "self.settings.seed * 1_000_003 + epoch", "self.settings.seed * 1_000_003 + 1", only=MANUAL,
    ),
    Fault(
        "train-order-seed", DATA, "Batches.batches", "--seed does not reach the order",
        "self.settings.seed * 1_000_003 + epoch", "epoch",
        only=(_TRAIN + "test_the_seed_draws_weights_split_and_order",),
    ),
    Fault(
        "train-weights-seed", RUN, "Run.__init__", "--seed does not reach the weights",
        "torch.manual_seed(settings.seed)", "torch.manual_seed(0)",
        only=(_TRAIN + "test_the_seed_draws_weights_split_and_order",),
    ),
    Fault(
        "train-split-seed", RECORDS, "find", "--seed does not reach the split",
        "settings.held_out, settings.seed",
        "settings.held_out, 0",
        only=(_TRAIN + "test_the_seed_draws_weights_split_and_order",),
    ),
    Fault(
        "train-split-overlaps", RECORDS, "stratified_split", "held-out images are trained on",
        "return (~mask).nonzero()[:, 0]", "return torch.arange(len(mask))",
        only=(_DATA + "test_digits_split_is_stratified_fixed_by_seed_and_disjoint",),
    ),
    Fault(
        "train-last-batch", DATA, "Batches.batches", "the smaller last batch is left out",
        "order.split(self.settings.batch_size)",
        "order[: len(order) // self.settings.batch_size * self.settings.batch_size]"
        ".split(self.settings.batch_size)",
        only=(_TRAIN + "test_batches_cover_every_image_once_and_depend_on_the_epoch_alone",),
    ),
    Fault(
        "train-share-weight", DATA, "Batches.batches", "a share weighs as its batch",
        "len(labels) * processes.world / len(batch)", "1.0", only=SHARES,
    ),
    Fault(
        "train-share-held-out", DATA, "InMemory._shown", "each process evaluates all images",
        "mine, draw = processes.share(len(batch)), None", "mine, draw = slice(None), None",
        only=SHARES,
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
        "train-broken-weighs", DATA, "Batches.batches", "a broken image weighs as read",
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
        "train-crop-once", STREAMING, "_shown", "an image is cropped alike in all epochs",
        "generator.initial_seed() * self.train_count % 2**62", "self.train_count",
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
        "train-lora-rank", MODEL, "add_lora", "--lora's rank ignored",
        "LoraConfig(r=rank,", "LoraConfig(r=8,",
        only=("commands/test_finetune.py::test_lora_on_a_swapped_model_of_the_disk",),
    ),
    Fault(
        "train-freeze", MODEL, "freeze", "--freeze ignored",
        "named[name].requires_grad_(False)", "pass",
        only=("commands/test_finetune.py::test_a_frozen_backbone",),
    ),
    Fault(
        "train-lora-unmerged", MODEL, "merged", "weights.pth without what LoRA learnt",
        "module.merge()", "pass",
        only=("commands/test_finetune.py::test_lora_on_a_swapped_model_of_the_disk",),
    ),
    Fault(
        "train-weights-head", MODEL, "load_into", "weights that lack a layer are taken",
        'if not HEAD.search(n)]:\n        more', 'if not HEAD.search(n) and False]:\n        more',
        only=("commands/test_finetune.py::test_weights_that_do_not_fit_change_nothing",),
    ),
    Fault(
        "train-defaults-warmup", SETTINGS, "", "the digits warm up for 2 epochs",
        "lr=2e-3, warmup_epochs=4, threads=1", "lr=2e-3, warmup_epochs=2, threads=1", only=DEFAULTS,
    ),
    Fault(
        "train-defaults-smoothing", SETTINGS, "", "labels are not smoothed by default",
        '"default 0.1", 0.1, share', '"default 0.1", 0.0, share', only=DEFAULTS,
    ),
    Fault(
        "train-no-check", TRAIN, "_checked", "a kernel that breaks the 2x rule is trained with",
        "if all(e.passed for e in errors):", "if True:",
        only=(_TRAIN + "test_a_broken_kernel_stops_the_training",),
    ),
    Fault(
        "train-confusion", REPORT, "write_report", "rows are the predicted classes",
        "source.held_out_labels[read] * classes + predicted[read]",
        "predicted[read] * classes + source.held_out_labels[read]",
        only=(_REPORT + "test_the_report_is_of_the_history_and_of_what_could_be_read",),
    ),
    Fault(
        "train-infinite", RUN, "Run.epoch", "a loss that is not finite goes on",
        "self.processes.agree(lambda: self._refuse_infinite(row))", "pass",
        only=(_TRAIN + "test_a_loss_that_is_not_finite_keeps_the_last_checkpoint",),
    ),
    # load_weights.
    # What no test looked at: figures of a report, of probe, of what stands beside a run.
    Fault(
        "train-compare-rng", RUN, "", "the plain model drops other paths",
        "checkpoint.set_rng_state(before)\n            result",
        "result",
        only=(_TRAIN + "test_plain_pytorch_beside_a_run_is_trained_alike[None]",),
    ),
    Fault(
        "train-rng-after", RUN, "", "the next epoch draws what this one drew",
        "checkpoint.set_rng_state(after or before)", "checkpoint.set_rng_state(before)",
        only=(_TRAIN + "test_plain_pytorch_beside_a_run_is_trained_alike[None]",),
    ),
    Fault(
        "train-reference-frozen", MODEL, "plain_copy", "the plain model trains what is frozen",
        'ours = copy.deepcopy(model)',
        'ours = copy.deepcopy(model).requires_grad_()',
        only=(_TRAIN + "test_plain_pytorch_beside_a_run_is_trained_alike[None]",),
    ),
    Fault(
        "train-host-train", RUN, "evaluate", "a plain host is evaluated as it trains",
        'model.eval()',
        'learner.name or model.eval()',
        only=(_TRAIN + "test_plain_pytorch_beside_a_run_is_trained_alike[hf]",),
    ),
    Fault(
        "train-ddp-same-paths", RUN, "", "all processes drop the same paths",
        "epoch * self.processes.world + self.processes.rank", "epoch * self.processes.world",
        only=(_TRAIN + "test_each_process_and_epoch_drops_other_paths",),
    ),
    Fault(
        "train-weight-of-share", RUN, "", "a share's gradient weighs as a batch",
        "(loss * weight).backward()", "loss.backward()",
        only=(_TRAIN + "test_a_gradient_weighs_as_its_share",),
    ),
    Fault(
        "train-metrics-digits", RUN, "", "metrics.csv has three digits",
        ":.8g", ":.3g",
        only=(_TRAIN + "test_speed_is_of_all_images_and_of_training_alone",),
    ),
    Fault(
        "train-images-per-s", RUN, "", "images/s is a step's",
        '"images_per_s": count / seconds', '"images_per_s": count / seconds / self.steps_per_epoch',
        only=(_TRAIN + "test_speed_is_of_all_images_and_of_training_alone",),
    ),
    Fault(
        "train-data-wait", RUN, "", "the wait for data is in seconds",
        'result["data_wait"] = waited / seconds', 'result["data_wait"] = waited',
        only=(_STREAMING + "test_the_share_of_time_spent_waiting_for_data",),
    ),
    Fault(
        "train-infinite-only", RUN, "", "a held-out loss may be infinite",
        "math.isfinite(value) for value in row.values()",
        "math.isfinite(row['train_loss']) for _ in row.values()",
        only=(_TRAIN + "test_no_figure_of_an_epoch_may_be_infinite",),
    ),
    Fault(
        "train-narrow-std", MODEL, "", "narrow models' positions start at 0.02",
        "std=0.3", "std=0.02",
        only=(_TRAIN + "test_narrow_models_start_from_larger_weights",),
    ),
    Fault(
        "train-narrow-le", MODEL, "", "C = 192 counts as narrow",
        "model.embed_dim < NARROW", "model.embed_dim <= NARROW",
        only=(_TRAIN + "test_narrow_models_start_from_larger_weights",),
    ),
    Fault(
        "train-narrow-xavier", MODEL, "", "narrow models' Linears start at 0.02",
        "nn.init.xavier_uniform_(module.weight)", "pass",
        only=(_TRAIN + "test_narrow_models_start_from_larger_weights",),
    ),
    Fault(
        "train-bytes-mixup", RUN, "", "MixUp mixes bytes",
        "plain = self.settings.mixup or self.settings.compare", "plain = self.settings.compare",
        only=(_STREAMING + "test_who_reads_bytes",),
    ),
    Fault(
        "train-bytes-compare", RUN, "", "the plain model reads bytes",
        "plain = self.settings.mixup or self.settings.compare", "plain = self.settings.mixup",
        only=(_STREAMING + "test_who_reads_bytes",),
    ),
    Fault(
        "train-mixup-alpha", RUN, "", "--mixup's ALPHA is 1",
        "alpha=self.settings.mixup", "alpha=1.0",
        only=(_STREAMING + "test_mixup_is_by_beta_of_alpha",),
    ),
    Fault(
        "train-weights-relative", SETTINGS, "given_options", "--weights is of another folder",
        '{"data_dir", "weights"}', '{"data_dir"}',
        only=(_FINETUNE + "test_weights_are_found_from_any_folder",),
    ),
    Fault(
        "train-datadir-relative", SETTINGS, "given_options", "--data-dir is of another folder",
        '{"data_dir", "weights"}', '{"weights"}',
        only=(_FINETUNE + "test_weights_are_found_from_any_folder",),
    ),
    Fault(
        "train-decay-of-zero", RUN, "make_optimizer", "--weight-decay 0 is the default's",
        '"weight_decay": settings.weight_decay,', '"weight_decay": settings.weight_decay or 0.05,',
        only=(_TRAIN + "test_weight_decay_is_on_matrices_alone",),
    ),
    Fault(
        "train-constant-channel", DATA, "", "a channel of one value makes huge numbers of others",
        ".item() / count) or 1.0)", ".item() / count) or 1e-12)",
        only=(_DATA + "test_normalization_is_mean_and_deviation_of_each_channel",),
    ),
    Fault(
        "train-float-images", DATA, "", "float images are cut to 8 bits",
        'image.mode.startswith(("I", "F"))', 'image.mode.startswith("I")',
        only=(_DATA + "test_images_are_cropped_about_their_centre_and_turned_upright",),
    ),
    Fault(
        "train-shard-labels", RECORDS, "_shards", "labels in the order of .cls, images in another",
        "[classes[key] for key in images]", "classes.values()",
        only=(_RECORDS + "test_classes_of_shards_are_those_of_training",),
    ),
    Fault(
        "train-pipe-open", PROCESSES, "ended_together", "an end of the pipe stays open",
        "        thread.join(1)\n        os.close(reader)", "        thread.join(1)",
        only=(_DISTRIBUTED + "test_a_run_that_ends_leaves_signals_and_files_as_they_were",),
    ),
    Fault(
        "train-zero-lost", SETTINGS, "given_options", "an option of 0, and --no-augment, is lost",
        "and v is not None}", "and v}",
        only=("commands/test_options.py::test_zero_is_not_the_default",),
    ),
    Fault(
        "train-broken-number", STREAMING, "", "a broken image hides one of its number elsewhere",
        "(name := images.records.name(number))", "(name := str(number))", only=BROKEN,
    ),
    Fault(
        "train-drawn-number", STREAMING, "", "what is drawn has the name of the first image",
        "return index, pixels[None]", "return 0, pixels[None]",
        only=(_STREAMING + "test_what_is_drawn_is_the_first_that_can_be_read",),
    ),
    Fault(
        "train-lora-compare", SETTINGS, "", "--lora and --compare are taken together",
        "(s.lora and s.compare, ", "(False, ",
        only=(_TRAIN + "test_mistakes",),
    ),
    Fault(
        "train-format", CHECKPOINT, "", "a checkpoint of another version is read",
        'or content.get("format") != FORMAT', "",
        only=(_RESUME + "test_what_is_no_checkpoint_of_this_version",),
    ),
    Fault(
        "train-numpy-gauss", CHECKPOINT, "", "numpy's second normal number is lost",
        "keys.numpy().astype(np.uint32), *rest", "keys.numpy().astype(np.uint32), rest[0]",
        only=(_RESUME + "test_the_random_states_are_all_restored",),
    ),
    Fault(
        "train-mirror-75", DATA, "", "three of four images are mirrored",
        "(draw[4] < 0)", "(draw[4] < 0.5)",
        only=(_DATA + "test_augmentation_identity_shift_and_mirror",),
    ),
    Fault(
        "train-split-trunc", RECORDS, "", "a class gives less than its share",
        "round(held_out * len(members))", "int(held_out * len(members))",
        only=(_DATA + "test_split_rounds_and_holds_one_of_two_images_out",),
    ),
    Fault(
        "train-split-least", RECORDS, "", "a small class gives no held-out image",
        "min(max(round(held_out * len(members)), 1), len(members) - 1)",
        "min(round(held_out * len(members)), len(members) - 1)",
        only=(_DATA + "test_split_rounds_and_holds_one_of_two_images_out",),
    ),
    Fault(
        "train-bicubic", DATA, "", "pixels are resized to the nearest",
        "Resampling.BICUBIC", "Resampling.NEAREST",
        only=(_DATA + "test_images_are_resized_bicubically",),
    ),
    Fault(
        "train-t10k-labels", RECORDS, "find", "held-out labels may exceed the classes",
        "{*range(len(classes))}", "{*range(len(classes) + 1)}",
        only=(_DATA + "test_held_out_digits_of_a_class_that_training_lacks",),
    ),
    Fault(
        "train-hidden-files", RECORDS, "", "hidden files are images",
        'and not p.name.startswith(".") and p.is_file()', "and p.is_file()",
        only=(_DATA + "test_folder_takes_val_and_leaves_hidden_files",),
    ),
    Fault(
        "train-val-test", RECORDS, "", "test/ goes before val/",
        'for n in ("val", "test") if', 'for n in ("test", "val") if',
        only=(_DATA + "test_folder_takes_val_and_leaves_hidden_files",),
    ),
    Fault(
        "train-memory", DATA, "", "images may take four times the memory",
        "if 2 * count * bytes_each > memory", "if count * bytes_each > 2 * memory",
        only=(_DATA + "test_images_are_twice_in_memory_while_they_are_read",),
    ),
    Fault(
        "train-sample-order", STREAMING, "", "the first images normalize, not drawn ones",
        "for i in order[:SAMPLE].tolist()", "for i in range(min(SAMPLE, len(train)))",
        only=(_STREAMING + "test_the_images_that_normalize_are_drawn",),
    ),
    Fault(
        "train-streamed-held-out", STREAMING, "", "other held-out files are the same data",
        'f"{train} {held_out} {self.classes}"', 'f"{train} {self.classes}"',
        only=(_STREAMING + "test_the_digest_of_streamed_images",),
    ),
    Fault(
        "train-streamed-classes", STREAMING, "", "other classes are the same streamed data",
        ' {self.classes}"', '"',
        only=(_STREAMING + "test_the_digest_of_streamed_images",),
    ),
    Fault(
        "train-stream-seed", DATA, "Batches.batches", "--seed does not reach streamed batches",
        "self.settings.seed * 1_000_003 + epoch", "epoch",
        only=(_STREAMING + "test_batches_depend_on_the_seed_alone",),
    ),
    Fault(
        "train-stream-held-crop", STREAMING, "__getitem__", "held-out images are not cropped",
        'None if seed is None else self.transforms',
        'self.transforms',
        only=(_STREAMING + "test_held_out_images_are_cropped_about_their_centre",),
    ),
    Fault(
        "train-workers", STREAMING, "", "--workers ignored",
        "if arguments.workers is None else arguments.workers", "",
        only=(_STREAMING + "test_the_number_of_workers",),
    ),
    Fault(
        "train-workers-default", STREAMING, "", "no core is left for the training",
        "min(8, (cores or 1) - 1)", "min(8, cores or 1)",
        only=(_STREAMING + "test_the_number_of_workers",),
    ),
    Fault(
        "train-check-torch", REPORT, "", "the check batch is of PyTorch",
        'with backend("triton"), quiet', 'with backend("torch"), quiet',
        only=(_REPORT + "test_the_check_batch_is_of_the_kernels",),
    ),
    Fault(
        "train-check-autocast", REPORT, "", "the check batch is in fp32",
        "agreement(run.model, images, run.autocast)", "agreement(run.model, images)",
        only=(_REPORT + "test_the_check_batch_is_of_the_kernels",),
    ),
    Fault(
        "train-check-autocast-host", REPORT, "", "a host's check batch is in fp32",
        "autocast=run.autocast)", "autocast=None)",
        only=(_REPORT + "test_the_check_batch_is_of_the_kernels",),
    ),
    Fault(
        "train-host-of", MODEL, "", "a swapped model is compared with itself",
        "swap_out(host)", "pass",
        only=(_REPORT + "test_the_hosts_own_code_is_what_a_swapped_model_is_compared_with",),
    ),
    Fault(
        "train-agreement-passed", REPORT, "", "the summary says that all passed",
        '"passed": e.passed', '"passed": True',
        only=(_REPORT + "test_the_report_is_of_the_history_and_of_what_could_be_read",),
    ),
    Fault(
        "train-median", REPORT, "", "images/s is the fastest epoch's",
        'statistics.median(row["images_per_s"]', 'max(row["images_per_s"]',
        only=(_REPORT + "test_the_report_is_of_the_history_and_of_what_could_be_read",),
    ),
    Fault(
        "train-seconds", REPORT, "", "the time is the last epoch's",
        'sum(row["seconds"] for row in run.history)', 'last["seconds"]',
        only=(_REPORT + "test_the_report_is_of_the_history_and_of_what_could_be_read",),
    ),
    Fault(
        "train-count-read", REPORT, "", "broken images count as wrong in the report",
        "int(read.sum())", "len(read)",
        only=(_REPORT + "test_the_report_is_of_the_history_and_of_what_could_be_read",),
    ),
    Fault(
        "train-compare-line", REPORT, "", "PyTorch's images/s are ours",
        'row["reference_images_per_s"] for', 'row["images_per_s"] for',
        only=(_REPORT + "test_the_report_is_of_the_history_and_of_what_could_be_read",),
    ),
    Fault(
        "train-true-class", REPORT, "", "the true class is the predicted one",
        "for of in (source.held_out_labels, predicted)", "for of in (predicted, predicted)",
        only=(_REPORT + "test_what_is_drawn_of_a_run",),
    ),
    Fault(
        "train-confusion-share", FIGURES, "", "shares are of the predicted class",
        "confusion.sum(1, keepdim=True)", "confusion.sum(0, keepdim=True)",
        only=(_REPORT + "test_what_is_drawn_of_a_run",),
    ),
    Fault(
        "train-curves-percent", FIGURES, "", "accuracies are drawn as shares",
        '("accuracy", 100, ', '("accuracy", 1, ',
        only=(_REPORT + "test_what_is_drawn_of_a_run",),
    ),
    Fault(
        "train-curves-reference", FIGURES, "", "the plain model is not drawn",
        'if "reference_train_loss" in history[0]', "if False",
        only=(_REPORT + "test_what_is_drawn_of_a_run",),
    ),
    Fault(
        "train-axes-layer", FIGURES, "draw_attention", "each head's panel is of the first",
        'F.interpolate(head[None, None]',
        'F.interpolate(layers[0][0][None, None]',
        only=(_REPORT + "test_each_panel_is_of_its_layer_and_head",),
    ),
    Fault(
        "train-overlay-layers", FIGURES, "draw_attention", "each layer's panels are of the first",
        'cell in (None, *layer)',
        'cell in (None, *layers[0])',
        only=(_REPORT + "test_each_panel_is_of_its_layer_and_head",),
    ),
    Fault(
        "train-cls-row", FIGURES, "", "a register's row is drawn",
        "maps[:, 0] if from_cls", "maps[:, num_prefix - 1] if from_cls",
        only=(_TRAIN + "test_patch_attention_reads_the_class_token_or_the_mean",),
    ),
    Fault(
        "train-part-content", RECORDS, "Records.digest", "another split is the same data",
        "content = self.origin, self.places, self.labels",
        "content = self.origin, self.labels",
        only=(_RECORDS + "test_the_digest_of_each_kind_of_records",),
    ),
    Fault(
        "train-shards-content", RECORDS, "Records.digest", "other shards are the same data",
        "content = self.origin, self.places, self.labels",
        "content = self.labels",
        only=(_RECORDS + "test_the_digest_of_each_kind_of_records",),
    ),
    Fault(
        "train-rows-content", RECORDS, "Records.digest", "another dataset is the same data",
        "content = self.origin, self.places, self.labels",
        "content = self.places, self.labels",
        only=(_RECORDS + "test_the_digest_of_each_kind_of_records",),
    ),
    Fault(
        "train-shards-min", RECORDS, "find", "class -1 is taken",
        "{*range(len(classes))}", "{*range(-1, len(classes))}",
        only=(_RECORDS + "test_a_shard_that_is_refused",),
    ),
    Fault(
        "train-shard-alone", RECORDS, "", "a .cls without an image is left out",
        "images.keys() ^ classes.keys()", "images.keys() - classes.keys()",
        only=(_RECORDS + "test_a_shard_that_is_refused",),
    ),
    Fault(
        "train-hf-validation", RECORDS, "", "test goes before validation",
        '("validation", "val", "test")', '("test", "val", "validation")',
        only=(_RECORDS + "test_a_dataset_of_hugging_face",),
    ),
    Fault(
        "train-hf-names", RECORDS, "", "classes are sorted",
        "list(columns[names[0]].names)", "sorted(columns[names[0]].names)",
        only=(_RECORDS + "test_a_dataset_of_hugging_face",),
    ),
    Fault(
        "train-shards-held-class", RECORDS, "find", "held-out shards may have another class",
        "{*train.labels, *(rest.labels if rest else ())}", "{*train.labels}",
        only=(_RECORDS + "test_classes_of_shards_are_those_of_training",),
    ),
    Fault(
        "train-fsdp-whole", RUN, "Learner.state", "a checkpoint holds the shards of one process",
        "value.full_tensor()",
        "value.to_local()",
        only=(_DISTRIBUTED + "test_a_killed_run_goes_on_with_another_number_of_processes",),
    ),
    Fault(
        "train-fsdp-reduce", PROCESSES, "", "FSDP2 reduces gradients in bf16",
        "None if dtype is None else torch.float32", "dtype",
        only=(_DISTRIBUTED + "test_fsdp_shards_every_block_then_the_model",),
    ),
    Fault(
        "train-fsdp-blocks", PROCESSES, "", "FSDP2 shards no block",
        "(*blocks_of(model), model)", "(model,)",
        only=(_DISTRIBUTED + "test_fsdp_shards_every_block_then_the_model",),
    ),
    Fault(
        "train-blocks-of", PROCESSES, "", "the smallest list is the blocks",
        "return max(lists,", "return min(lists[1:],",
        only=(_DISTRIBUTED + "test_the_blocks_of_a_model",),
    ),
    Fault(
        "train-lost-words", PROCESSES, "", "any error is a lost peer",
        "return isinstance(error, RuntimeError) and any(",
        "return isinstance(error, RuntimeError) or any(",
        only=(_DISTRIBUTED + "test_only_a_peer_that_is_gone_is_said_to_be_gone",),
    ),
    Fault(
        "train-unused", PROCESSES, "", "DDP looks for no unused parameter",
        "find_unused_parameters=not isinstance(model, VisionTransformer)",
        "find_unused_parameters=False",
        only=(_DISTRIBUTED + "test_ddp_looks_for_unused_parameters_of_hosts_alone",),
    ),
    Fault(
        "train-freeze-before-lora", MODEL, "model_of", "LoRA thaws what --freeze names",
        "    if settings.lora:\n        add_lora(model, settings.lora)\n"
        "    freeze(model, settings.freeze)",
        "    freeze(model, settings.freeze)\n"
        "    if settings.lora:\n        add_lora(model, settings.lora)",
        only=(_FINETUNE + "test_what_lora_trains",),
    ),
    Fault(
        "train-lora-head", MODEL, "", "the head is not trained beside LoRA",
        "parameter.requires_grad_(True)", "pass",
        only=(_FINETUNE + "test_what_lora_trains",),
    ),
    Fault(
        "train-merged-copy", MODEL, "", "the weights are merged under training",
        "model = copy.deepcopy(model)", "pass",
        only=(_FINETUNE + "test_what_lora_trains",),
    ),
    Fault(
        "train-wrapper-order", MODEL, "", "a teacher's weights are not found",
        '_WRAPPERS = ("state_dict", "model", "model_ema", "teacher")',
        '_WRAPPERS = ("state_dict",)',
        only=(_FINETUNE + "test_the_tensors_in_a_file_of_another_trainer",),
    ),
    Fault(
        "train-prefix", MODEL, "", "torch.compile's prefix stays",
        'for prefix in ("module.", "_orig_mod.")', 'for prefix in ("module.",)',
        only=(_FINETUNE + "test_the_tensors_in_a_file_of_another_trainer",),
    ),
    Fault(
        "train-freeze-all", MODEL, "", "nothing is trained",
        "if patterns and not any(", "if False and not any(",
        only=(_FINETUNE + "test_a_frozen_backbone",),
    ),
    Fault(
        "train-hf-home", MODELS, "", "HF_HOME ignored",
        'os.environ.get("HF_HOME") or ', "",
        only=(_FINETUNE + "test_where_the_cache_is",),
    ),
    Fault(
        "train-shard-named", STREAMING, "_read", "a broken image of a shard is named in each epoch",
        '(name := images.records.name(number))',
        '(name := message)',
        only=(_STREAMING + "test_a_broken_image_of_a_shard_is_named_once",),
    ),
    Fault(
        "train-knn-metric", PROBE, "", "neighbours by distance",
        'metric="cosine", ', "",
        only=(_PROBE + "test_neighbours_are_near_by_angle",),
    ),
    Fault(
        "train-knn-weights", PROBE, "", "neighbours weigh alike",
        ', weights="distance"', "",
        only=(_PROBE + "test_neighbours_weigh_by_their_nearness_and_are_as_many_as_asked",),
    ),
    Fault(
        "train-knn-k", PROBE, "", "--neighbours ignored",
        "min(neighbours, len(y[0]))", "min(20, len(y[0]))",
        only=(_PROBE + "test_neighbours_weigh_by_their_nearness_and_are_as_many_as_asked",),
    ),
    Fault(
        "train-probe-scaler", PROBE, "", "features are not scaled",
        "make_pipeline(preprocessing.StandardScaler(), regression)", "make_pipeline(regression)",
        only=(_PROBE + "test_features_are_scaled_for_the_linear_probe",),
    ),
    Fault(
        "train-probe-score", PROBE, "", "scores of training images",
        ".score(rest, wanted)", ".score(train, labels)",
        only=(_PROBE + "test_both_figures_are_of_the_held_out_images",),
    ),
    Fault(
        "train-probe-augment", PROBE, "", "probe augments",
        '"augment": False', '"augment": True',
        only=(_PROBE + "test_the_command_reads_images_as_they_are_and_says_both_figures",),
    ),
    Fault(
        "train-probe-autocast", PROBE, "", "probe's --dtype ignored",
        "enabled=low", "enabled=False",
        only=(_PROBE + "test_features_are_those_of_the_frozen_model",),
    ),
    Fault(
        "train-probe-seed", PROBE, "", "probe's --seed ignored",
        "torch.manual_seed(settings.seed)", "pass",
        only=(_PROBE + "test_the_command_reads_images_as_they_are_and_says_both_figures",),
    ),
    Fault(
        "train-probe-percent", PROBE, "", "the linear probe's figure is k-NN's",
        "Linear probe: {100 * result['linear']:.2f}", "Linear probe: {100 * result['knn']:.2f}",
        only=(_PROBE + "test_the_command_reads_images_as_they_are_and_says_both_figures",),
    ),
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
        "(len(part) if part.isdecimal() else 0, part)", "(0, part)", only=REPORTED,
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
