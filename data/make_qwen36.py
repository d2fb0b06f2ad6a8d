"""Makes a tiny Qwen3.6: random weights under the layers, tensor names, shards and chat format of Qwen3.6-35B-A3B.

    layers    3 gated-delta + 1 gated attention, again and again; in each a mixture of experts and a shared expert
    tensors   model.language_model.*, model.visual.*, lm_head.weight and the 19 of the MTP head, mtp.*; bf16, two shards
    chat      ChatML with XML calls, each assistant turn opened with <think>

Who has no room for 35 B weights tests on it what is to run on them. What would hide a fault is not as random weights
are by default: norms are not all the same (the zero-centred norm of this family and its place show), logits are wide
(a wrong token is not a near tie), and the recurrent state decays over some ten tokens, not within one.

    python data/make_qwen36.py --out DIR
    python data/make_qwen36.py --out DIR --experts single       # of the MTP head one by one, as Qwen3.5 stores them

Seconds, and nothing is downloaded: the tokenizer is the one of data/base-small with the vision tokens added. Same
options, same seed -> same files. Left out: a vision tower that sees; its tensors are there to be passed over.
"""

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from options import option, parse  # noqa: E402
from common import cli, write_json, write_text  # noqa: E402

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import AddedToken, Tokenizer  # noqa: E402
from transformers import (  # noqa: E402
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)

from chat import Codec  # noqa: E402
from model import MTP  # noqa: E402


@dataclass
class Config:
    out: str = option(MISSING, "directory of the checkpoint")
    layers: int = option(4, "of the model; each fourth one is an attention layer", min=1)
    hidden: int = option(64, "width of the model", min=8)
    experts: Literal["fused", "single"] = option("fused", "how the MTP head's experts are stored")
    seed: int = option(0, "of the weights")


VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

# For `apply_chat_template` of other programs; HAT itself writes ids through chat.Codec, and both agree. @HEAD@ and
# @TAIL@ are what stands before and after the list of tools. The reasoning of every assistant turn stays: Qwen's own
# template does so with preserve_thinking, and only then is history append-only.
TEMPLATE = """\
{%- set system = messages[0].content | trim if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
{{- @HEAD@ }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- @TAIL@ + ('\\n\\n' + system if system else '') + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content }}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- ('\\n\\n' if loop.first else '\\n') if message.content or not loop.first }}
{{- '<tool_call>\\n<function=' + function.name + '>\\n' }}
{%- for key, value in function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n') }}
{%- endif %}
"""


def template(codec: Codec) -> str:
    """The chat template; the wording around the tools is the codec's."""
    text = codec.text([], tools=[])  # a system message of nothing else, then the opening of the assistant's turn
    head, tail = text[: text.index("<|im_end|>")].split("\n</tools>")
    return TEMPLATE.replace("@HEAD@", json.dumps(head)).replace("@TAIL@", json.dumps("\n</tools>" + tail))


def configuration(tokenizer: Tokenizer, cfg: Config) -> Qwen3_5MoeConfig:
    """The proportions are those of Qwen3.6-35B-A3B, as far as they go."""
    text = dict(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64 + 64,  # some rows beyond the tokens, as there are
        hidden_size=cfg.hidden,
        num_hidden_layers=cfg.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        initializer_range=0.2,
        mtp_num_hidden_layers=1,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    )
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, num_position_embeddings=16)
    places = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {place: tokenizer.token_to_id(token) for place, token in zip(places, VISION)}
    return Qwen3_5MoeConfig(text_config=text, vision_config=vision | {"out_hidden_size": cfg.hidden}, **ids)


def random_tensors(config: Qwen3_5MoeConfig, cfg: Config) -> tuple[dict, dict]:
    """Tensors of the model and of its MTP head, by the names of the checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model = Qwen3_5MoeForConditionalGeneration(config)
        head = MTP(Qwen3_5MoeForCausalLM(config.text_config), cfg.seed)
        head.single_experts = cfg.experts == "single"
        for name, p in [*model.named_parameters(), *head.named_parameters()]:
            if "norm" in name:
                p.data += 0.2 * torch.randn_like(p)
            elif name.endswith("A_log"):
                p.data.uniform_(0.01, 0.2).log_()
    return (
        {name: t.to(torch.bfloat16).contiguous() for name, t in x.items()} for x in (model.state_dict(), head.tensors())
    )


def main(argv: list[str]):
    cfg = parse(Config, {}, argv, __doc__)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = Tokenizer.from_file(str(ROOT / "data" / "base-small" / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "eos_token": "<|im_end|>"}
    settings |= {"pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    write_text(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    write_json(out / "tokenizer_config.json", settings)
    write_text(out / "chat_template.jinja", template(Codec(tokenizer, calls="xml")))

    config = configuration(tokenizer, cfg)
    config.architectures, config.dtype = ["Qwen3_5MoeForConditionalGeneration"], "bfloat16"
    config.save_pretrained(out)
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    write_json(out / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    shards = random_tensors(config, cfg)
    places, size = {}, 0
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05d}-of-00002.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size += sum(t.nbytes for t in tensors.values())
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})
    print(f"{out}: {len(places)} tensors, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    cli(main)
