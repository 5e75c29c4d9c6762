"""The commands of ``mm-convert``: what each does with its fields in ``checkpoint.options``."""

from pathlib import Path

from checkpoint import options
from checkpoint.verify import diff_directories, show_directory, verify_directory
from mm.checkpoint import convert
from mm.checkpoint.adapters import merge_into_base, mindspeed_to_peft, peft_to_mindspeed
from mm.checkpoint.convert import HF_DIR, LAYOUT, SOURCE_LAYOUT, TARGET_LAYOUT, Conversion
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.checkpoint.peft import PREFIX
from mm.errors import UserError, naming, printable, refuse

_COMMON = "--cfg.common_model_config"


def run(cfg: object) -> int:
    """Run the command that ``cfg`` belongs to; returns the exit status."""
    is_equal, lines = True, ()
    match cfg:
        case options.ConversionConfig():
            _conversion(cfg).run(cfg.num_workers, cfg.dry_run, cfg.overwrite)
        case options.VerifyConfig():
            layout = _layout(cfg.parallel_config, LAYOUT)
            lines = verify_directory(Path(cfg.mm_dir), _dir(cfg.hf_config), layout, cfg.num_workers)
        case options.DiffConfig():
            lines, is_equal = diff_directories(cfg.source_dir, cfg.target_dir, _dir(cfg.hf_config), cfg.num_workers)
        case options.ShowConfig():
            lines = show_directory(Path(cfg.dir))
    if lines:
        print(printable("\n".join(lines)))
    return 0 if is_equal else 1


def _conversion(cfg: options.ConversionConfig) -> Conversion:
    match cfg:
        case options.HFToMMConfig():
            return _hf_to_mm(cfg)
        case options.MMToHFConfig():
            common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
            _check(common, hf_dir)
            return convert.mm_to_hf(cfg.mm_dir, hf_dir, cfg.save_hf_dir, _layout(cfg.parallel_config, LAYOUT),
                                    _structure(common), common.vit_qkv_order)
        case options.ResplitConfig():
            common, hf_dir = cfg.common_model_config, _dir(cfg.hf_config)
            source = _layout(cfg.source_parallel_config, SOURCE_LAYOUT)
            target = _given_layout(cfg.target_parallel_config, TARGET_LAYOUT)
            _check(common, hf_dir)
            return convert.resplit(cfg.source_dir, cfg.target_dir, source, target, hf_dir,
                                   cfg.save_format and Format(cfg.save_format), _structure(common),
                                   common.vit_qkv_order)
        case options.LoraHFToMMConfig():
            _check(cfg.common_model_config, None, of_adapters=True)
            layout = _given_layout(cfg.parallel_config, LAYOUT)
            return peft_to_mindspeed(cfg.hf_config.hf_dir, cfg.mm_dir, layout, Format(cfg.save_format), cfg.base_dir)
        case options.LoraMMToHFConfig():
            _check(cfg.common_model_config, None, of_adapters=True)
            layout = _layout(cfg.parallel_config, LAYOUT)
            return mindspeed_to_peft(cfg.mm_dir, cfg.save_hf_dir, layout, _dir(cfg.hf_config), cfg.lora_alpha)
    assert isinstance(cfg, options.MergeLoraConfig), cfg
    return merge_into_base(cfg.lora_dir, cfg.hf_config.hf_dir, cfg.save_hf_dir)


def _hf_to_mm(cfg: options.HFToMMConfig) -> Conversion:
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
    language_dir, same = _dir(cfg.llm_hf_config), common.llm_hf_dir
    if language_dir and same and Path(language_dir).resolve() != Path(same).resolve():
        raise UserError(f"--cfg.llm_hf_config.hf_dir is {language_dir}, but {_COMMON}.llm_hf_dir is {same}; give one "
                        f"of them.")
    _check(common, hf_dir)
    storage = Storage(Format(cfg.save_format), _structure(common) or Structure.FUSED, cfg.save_vit_only)
    layout = _given_layout(cfg.parallel_config, LAYOUT)
    return convert.hf_to_mm(hf_dir, cfg.mm_dir, layout, storage, language_dir or same)


def _dir(given: options.HFConfig | None) -> str | None:
    return given and given.hf_dir


def _layout(given: options.ParallelConfig | None, flag: str) -> Layout | None:
    return given and _given_layout(given, flag)


def _given_layout(given: options.ParallelConfig, flag: str) -> Layout:
    """The layout that the section ``flag`` describes."""
    if given.vit_tp_size not in (0, given.tp_size):
        raise UserError(f"{flag}.vit_tp_size is {given.vit_tp_size}; expected 0 or tp_size = {given.tp_size}, because "
                        f"both towers are cut the same way; for a ViT that is not cut, give {flag}.encoder_placement "
                        f"tensor_ranks.")
    return Layout(given.vit_pp_layers, given.llm_pp_layers, given.tp_size, given.encoder_placement)


def _structure(common: options.CommonModelConfig) -> Structure | None:
    """The requested structure; None: the default."""
    return {None: None, True: Structure.CANONICAL, False: Structure.FUSED}[common.enable_canonical_hf_struct]


def _check(common: options.CommonModelConfig, hf_dir: str | None, of_adapters: bool = False) -> None:
    """Raise UserError naming each stated fact that is false for the model in ``hf_dir``."""
    problems: list[str] = []
    if common.model_prefix and not (of_adapters and common.model_prefix == PREFIX):
        problems.append(f"{_COMMON}.model_prefix is {common.model_prefix!r}; only the names of adapters carry a "
                        f"prefix, which is {PREFIX!r}: leave the flag out.")
    if of_adapters and common.enable_canonical_hf_struct is False:
        problems.append(f"{_COMMON}.enable_canonical_hf_struct is false, but adapters always have separate q, k, v "
                        f"and gate, up; leave the flag out.")
    for name, fact in _facts(hf_dir).items() if hf_dir is not None else ():
        stated = getattr(common, name)
        if stated not in (None, fact):
            problems.append(f"{_COMMON}.{name} is {stated}, but {hf_dir} has {fact}; leave the flag out, or give "
                            f"the right directory.")
    refuse(problems)


def _facts(hf_dir: str) -> dict[str, object]:
    """The true values of the fields of ``CommonModelConfig`` that describe the model."""
    with naming(HF_DIR):
        directory = HFDirectory.open(hf_dir, weights_required=False)
        model = directory.model_config()
    return {"num_key_value_heads": model.language.num_query_groups, "tie_word_embeddings": model.language.tied,
            "llm_num_layers": model.language.num_layers, "vit_num_layers": model.vision.num_layers,
            "new_transformers_weight_key": any(name != one.name for name, one in directory.tensors.items())}
