"""Command lines as users of ik_llama.cpp and llama.cpp write them, pasted behind `quantkit`.

Only names of files, and numbers of threads and of chunks, are replaced by what the tiny models and this machine allow.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from quantkit import cli
from quantkit.formats import gguf
from tests.cli.running import refused
from tests.documentation import make_world


class Line(NamedTuple):
    """A command line, patterns that its output and its messages must have, and the files that it writes."""

    line: str
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


CUSTOM = "'blk\\.\\d+\\.ffn_down_exps\\.weight=iq3_k_r4,blk\\.\\d+\\.ffn_(gate|up)_exps\\.weight=iq2_k_r4,.*=q8_0'"
LINES = [
    # llama-quantize
    Line(
        f"./llama-quantize --imatrix moe.dat --custom-q {CUSTOM} moe-bf16.gguf moe-IQ2_K_R4.gguf IQ2_K_R4 2",
        ("iq3_k_r4", "iq2_k_r4"),
        files=("moe-IQ2_K_R4.gguf",),
    ),
    Line("./build/bin/llama-quantize model-bf16.gguf Q4_0", ("OUT is not given",), files=("ggml-model-Q4_0.gguf",)),
    Line(
        "llama-quantize --allow-requantize --output-tensor-type q6_0 --token-embedding-type Q8_0 --pure "
        "model-q8_0.gguf model-q4.gguf q4_0 2",
        files=("model-q4.gguf",),
    ),
    Line("llama-quantize --dry-run model-bf16.gguf dry.gguf Q4_0", ("q4_0",)),
    Line(
        "llama-quantize --keep-split set-00001-of-00005.gguf kept.gguf Q4_0",
        files=("kept-00001-of-00005.gguf", "kept-00005-of-00005.gguf"),
    ),
    Line(
        "./llama-quantize --keep-split --individual-tensors 2,3 set-00001-of-00005.gguf some.gguf q4_0 2",
        ("5 of 21|10 of 21|15 of 21",),
        files=("some-00001-of-00005.gguf", "some-00002-of-00005.gguf", "some-00003-of-00005.gguf"),
    ),
    Line(
        "llama-quantize --repack --repack-pattern ffn_down,ffn_up model-q8_0.gguf repacked.gguf Q8_0 2",
        ("q8_0_r8",),
        files=("repacked.gguf",),
    ),
    Line("quantize --override-kv general.name=str:Mine model-bf16.gguf mine.gguf Q8_0", files=("mine.gguf",)),
    Line(
        "./build/bin/llama-quantize --imatrix moe.dat --token-embedding-type q8_0 --attn-q-type q6_K "
        "--attn-k-type q6_K --attn-v-type q6_K --attn-qkv-type q6_K --attn-output-type q6_K --ffn-gate-type q6_K "
        "--ffn-down-type q6_K --ffn-up-type q6_K --custom-q '\\.ffn_.*_shexp\\.weight=q6_K,output\\.weight=q6_K' "
        "--custom-q 'blk\\.0\\.ffn_down_exps\\.weight=q5_K,blk\\.1\\.ffn_down_exps\\.weight=iq4_k' "
        "moe-bf16.gguf types.gguf Q6_K 2",
        ("iq4_k", "q5_K"),
        files=("types.gguf",),
    ),
    Line(
        "./llama-quantize --custom-q attn_q.weight=q8_0_r8 --custom-q output.weight=q8_0_r8 --imatrix dense.dat "
        "--allow-requantize model-q8_0.gguf 145",
        ("q8_0_r8", "OUT is not given"),
        files=("ggml-model-IQ4_KS.gguf",),
    ),
    Line(
        "llama-quantize --tensor-type attn_v=q8_0 --tensor-type ffn_down=q6_k --include-weights attn "
        "--leave-output-tensor --imatrix dense.dat model-bf16.gguf parts.gguf Q4_K_M",
        files=("parts.gguf",),
    ),
    Line(
        "llama-quantize --slow-iq2ks --per-layer-token-embedding-type q8_0 --imatrix dense.dat model-bf16.gguf ks.gguf "
        "IQ2_KS",
        ("iq2_ks",),
        ("--slow-iq2ks has no effect",),
        ("ks.gguf",),
    ),
    # llama-imatrix
    Line(
        "llama-imatrix --in-file dense.dat --in-file more.dat -o joined.dat", ("from 2 files",), files=("joined.dat",)
    ),
    Line("llama-imatrix --in-file moe.dat --show-statistics", ("blk.0",)),
    Line(
        "llama-imatrix -m model-bf16.gguf -f calibration.txt -o imatrix.dat -c 512 --chunks 2 -ngl 99 -fa -t 2 "
        "-b 2048 -ub 512 --no-mmap --verbosity 1",
        (r"\[2\]\d+\.\d+,", "Final estimate: PPL = "),
        ("-ngl 99 has no effect", "-ub 512 has no effect", "-lv 1 has no effect"),
        ("imatrix.dat",),
    ),
    Line(
        "./build/bin/llama-imatrix --model moe-bf16.gguf --file calibration.txt --output-file moe.gguf --chunks 1 "
        "--process-output --threads 2 -mla 1 -fmoe",
        files=("moe.gguf",),
    ),
    Line(
        "llama-imatrix -m model-q8_0.gguf -f - -o stdin.dat --chunks 1",
        ("Final estimate",),
        ("of -, batch",),
        ("stdin.dat",),
    ),
    Line(
        "llama-imatrix -m model-q8_0.gguf --in-file dense.dat -f calibration.txt -o added.dat --chunks 1 -t -1 "
        "--output-format dat --parse-special --no-warmup -v -sas -rcache",
        ("Final estimate",),
        ("--no-warmup has no effect", "-v has no effect", "-sas has no effect", "-rcache has no effect"),
        ("added.dat",),
    ),
    Line(
        "llama-imatrix -m model-q8_0.gguf -f calibration.txt --chunks 1 -c 128 -lsim --output-format gguf",
        ("^sorted layer importances", r"^  0: Layer   \d, <cos_sim> = 0\.\d+"),
        files=("imatrix.gguf",),
    ),
    # llama-perplexity
    Line(
        "./llama-perplexity -m moe-bf16.gguf -f wiki.txt -fa -fmoe -mla 3 -amb 512 -ctk f16 -c 512 --seed 1337 "
        "-ngl 99 -ot exps=CPU --threads 2 -ub 4096 -b 4096 --no-mmap --chunks 2",
        (r"Final estimate: PPL over 2 chunks for n_ctx=512 = \d+\.\d+ \+/- ",),
        ("-s 1337 has no effect", "-ub 4096 has no effect", "cache_type f16"),
    ),
    Line(
        "llama-perplexity --model model-bf16.gguf --file - --ctx-size 512 --batch-size 512 --chunks 1 --flash-attn on",
        ("Final estimate",),
        ("text -,",),
    ),
    Line(
        "llama-perplexity -m model-bf16.gguf -f wiki.txt --chunks 2 --kl-divergence-base logits.kld --mlock",
        ("Final estimate",),
        ("--mlock: ",),
        ("logits.kld",),
    ),
    Line(
        "llama-perplexity -m model-q8_0.gguf --kl-divergence-base base.kld --kl-divergence -fa 1 -tb 2",
        ("====== KL divergence statistics ======", "Same top p"),
    ),
    Line(
        "perplexity -m model-q8_0.gguf -f wiki.txt --chunks 1 --flash_attn off -rtr --cpu-moe --ppl-output-type 1",
        (r"^\s+0\s+\d", "Final estimate"),
        ("repacked", "flash_attention off"),
    ),
    Line(
        "llama-perplexity --threads 2 --flash-attn on --file wiki.txt --kl-divergence-base base.kld --kl-divergence "
        "--model model-q8_0.gguf --batch-size 2048 --ubatch-size 2048 --parallel 4 --log-disable",
        ("Same top p",),
        ("-np 4 has no effect", "--log-disable has no effect"),
    ),
    Line(
        "llama-perplexity -m moe-bf16.gguf -f wiki.txt -c 512 --chunks 1 -no-fa -ger -ngl auto --no-warmup --verbose "
        "-t -1 -tb -1 -dev none --prio 2",
        ("Final estimate",),
        ("flash_attention off", "-ger has no effect: experts are selected by groups", "--prio 2 has no effect"),
    ),
    Line(
        "llama-perplexity -m model-q8_0.gguf -f wiki.txt -c 256 --chunks -1 -ngl all", (r"\[2\]",), ("-ngl all has no",)
    ),
    Line("llama-perplexity -m short.gguf -f wiki.txt -c 0 --chunks 1", (r"n_ctx=64 ",)),
    # llama-sweep-bench
    Line(
        "./llama-sweep-bench -c 64 -ub 32 -m model-q8_0.gguf -ctk q8_KV -ctv q8_0 -fa --output-format jsonl",
        ('"n_kv": 32',),
    ),
    Line(
        "./build/bin/llama-sweep-bench --model moe-bf16.gguf --ctx-size 64 -ctk q8_0 -fa -fmoe -mla 3 -amb 512 -ub 32 "
        "-b 32 -ngl 99 -ot exps=CPU --n-cpu-moe 2 --warmup-batch -n 4 --threads 2 --no-mmap -gr -smgs -no-ooae "
        "-cuda fusion=1 -cram 0",
        (r"\|\s+32 \|\s+4 \|",),
        ("-gr has no effect", "-cuda fusion=1 has no effect", "-cram 0 has no effect"),
    ),
    Line(
        "./llama-sweep-bench -m moe-bf16.gguf -c 256 -ub 64 -b 128 -ctk q8_0 -ctv q8_0 -fa -fmoe -mla 3 -amb 512 "
        "-ngl 99 --threads 2 --warmup-batch --no-mmap -n 8 -muge -mqkv",
        (r"\|\s+64 \|\s+8 \|\s+128 \|",),
        ("-muge has no effect", "-mqkv has no effect"),
    ),
    Line(
        "llama-sweep-bench --model model-q8_0.gguf -c 64 -b 32 -ub 512 -rtr -t 2 -thp --numa distribute -nrep 2",
        (r"\|\s+32 \|",),
        ("-thp", "--numa distribute has no effect"),
    ),
    Line("llama-sweep-bench -m short.gguf -c 0 -ub 16 --no-warmup -no-fa", (r"\|\s+48 \|",), ("warmup none",)),
    # llama-bench
    Line(
        "./llama-bench -m model-q8_0.gguf -p 64 -n 4 -r 1 -t 2 -fa 0,1 -rtr 0,1 -ngl 99",
        (r"\| flash_attn \| repack \|", r"\| 0 \| 0 \| pp64 \|", r"\| 1 \| 1 \| tg4 \|"),
    ),
    Line(
        "llama-bench -m model-q8_0.gguf -m moe-bf16.gguf -p 32 -n 0 -r 1 -ctk f16,q8_0 -ctv f16 -mmp 0 -fmoe 1 "
        "-b 2048 -ub 512,1024 -o jsonl",
        ('"test": "pp32"', '"type_k": "q8_0"', '"use_mmap": false'),
        ("-ub 512,1024 has no effect",),
    ),
    Line(
        "llama-bench -m moe-bf16.gguf -pg 32,4 -p 0 -n 0 -r 1 -fmoe 0,1 -mla 1,3 -amb 256,512 -o csv", ("pp32\\+tg4",)
    ),
    Line(
        "./build/bin/llama-bench --model model-q8_0.gguf -p 0 -n 4 -gp 32,4 -t 2 -fa 1 -rtr 1 -r 1 --mmap 0 -ngl 0",
        (r"tg4@pp32",),
    ),
    Line(
        "llama-bench -m model-q8_0.gguf -p 16-64*2,8 -n 0 -r 1 -w 0 -ngl 0,99 -embd 0 -oe none --delay 0 --prio 1 "
        "-ger 1 -sas 1 -rcache 0 -v -no-fa -t -1",
        (r"pp16 .*\n.*pp32 .*\n.*pp64 .*\n.*pp8 .*\n\Z",),
        ("-ngl 0,99 has no effect", "-ger has no effect", "-rcache has no effect", "flash_attention off"),
    ),
    Line("llama-bench -m model-q8_0.gguf -p 4-8+4 -n 0 -r 1 --warmup 1 -amb 128-256*2", (r"\| 256 \| pp8 ",)),
    # llama-batched-bench
    Line(
        "llama-batched-bench -m model-q8_0.gguf -c 1024 -b 2048 -ub 512 -npp 16,64 -ntg 4 -npl 1,2,20 -fa -ngl 0",
        (r"\|\s+16 \|\s+4 \|\s+20 \|\s+400 \|", r"\|\s+64 \|\s+4 \|\s+2 \|\s+136 \|"),
        ("skipped: 64 \\+ 4 tokens of 20 sequences are 1360", "-b 2048 has no effect"),
    ),
    Line("batched-bench -m model-q8_0.gguf -npp 32 -ntg 4 -npl 3 -pps", (r"\|\s+32 \|\s+4 \|\s+3 \|\s+44 \|",)),
    # llama-cli
    Line(
        'llama-cli -m model-q8_0.gguf -p "The capital of France is" -n 4 -c 256 -t 2 --temp 0 -no-cnv '
        "--no-display-prompt -fa -s 42",
        err=("generation [0-4] tokens", "seed 42"),
    ),
    Line(
        "llama-cli -m moe-bf16.gguf -f prompt.txt -n 3 -fa on -ctk q8_0 -ctv q8_0 -ser 1,0.5 -tb 4 --display-prompt",
        ("^A recipe",),
        ("-tb 4 has no effect", "cache q8_0"),
    ),
    Line(
        "llama-cli -m model-q8_0.gguf --prompt Hi --n-predict 3 --ctx-size 256 --temp 0.6 --top-p 0.95 --top-k 40 "
        "--min-p 0.05 --repeat-penalty 1.1 --threads 2 -no-cnv --jinja -s 1",
        err=("generation [0-4] tokens", "--jinja has no effect"),
    ),
    Line(
        "llama-cli -m model-q8_0.gguf -p 'One\\ntwo' -e --predict 3 --seed -1 --ignore-eos --keep 4 --color -st "
        "--display-prompt -c 0",
        ("^One\ntwo",),
        ("--keep 4 has no effect", "-co has no effect", "-st has no effect", "generation 3 tokens.*-n reached"),
    ),
    # llama-gguf-split
    Line(
        "./llama-gguf-split --split --split-max-tensors 8 model-q8_0.gguf eight",
        ("eight-00003-of-00003.gguf",),
        files=("eight-00001-of-00003.gguf",),
    ),
    Line("llama-gguf-split --split-max-size 1M model-bf16.gguf mega", files=("mega-00001-of-00003.gguf",)),
    Line("llama-gguf-split --merge set-00001-of-00005.gguf merged.gguf", files=("merged.gguf",)),
    Line(
        "llama-gguf-split --merge --dry-run set-00001-of-00005.gguf not-there.gguf",
        ("5 shards, 21 tensors, .* would become not-there.gguf; nothing is written",),
    ),
    # convert_hf_to_gguf.py
    Line("python3.11 -u convert_hf_to_gguf.py --print-supported-models", ("^llama: LlamaForCausalLM",)),
    Line("/usr/bin/python -u convert_hf_to_gguf.py HF_DIR --outfile conv/u.gguf --outtype f16", files=("conv/u.gguf",)),
    Line(
        "python convert_hf_to_gguf.py HF_DIR --outfile conv/{name}-{ftype}.gguf --outtype bf16",
        files=("conv/HF_DIR-bf16.gguf",),
    ),
    Line("python3 ./convert_hf_to_gguf.py --outtype q8_0 MOE_DIR/", files=("MOE_DIR/MOE_DIR-Q8_0.gguf",)),
    Line(
        "convert_hf_to_gguf.py --outtype bf16 --outfile conv/big.gguf HF_DIR/ --split-max-size 1M --no-lazy --verbose",
        err=("--no-lazy has no effect", "--verbose has no effect: quantkit has no log levels"),
        files=("conv/big-00001-of-00003.gguf",),
    ),
    # what the other programs have no tool for, with their flags
    Line(
        "plan -m moe-bf16.gguf IQ2_K_R4 -ngl 99 -ot 'blk\\.(0)\\.ffn_.*=CUDA0' -ot exps=CPU -c 1024 -ctk q8_0",
        ("CUDA0", "CPU"),
    ),
    Line(
        "compare model-bf16.gguf -m model-q8_0.gguf,ggml-model-Q4_0.gguf -f - -c 128 --chunks 2 -b 512 -tb 2",
        ("model-q8_0", "ggml-model-Q4_0"),
    ),
    Line("plan model-bf16.gguf Q4_0 -c 0 -q --no-progress", ("^cache for 1024 tokens",)),
    Line("inspect model-q8_0.gguf --quiet --no-progress --no-tensors", ("general.architecture",)),
    Line("types -q", ("iq4_ks",)),
    Line("metadata get model-q8_0.gguf general.architecture -q --no-progress", ("^llama",)),
    Line("recipe --quiet", ("rules",)),
    Line("perplexity -m model-q8_0.gguf --chat chat.txt --chunks 1 -c 64", ("Final estimate",)),
    Line("quantize model-bf16.gguf part.gguf Q4_0 --only 'blk\\.0\\.'", ("9 of 21 tensors",), files=("part.gguf",)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models and texts under the names in `LINES`."""
    folder = tmp_path_factory.mktemp("pasted")
    make_world(folder)
    (folder / "prompt.txt").write_text("A recipe names a type\n", encoding="utf-8")
    (folder / "chat.txt").write_text("Who are you?\n\nA model.\n\n" * 40, encoding="utf-8")
    (folder / "conv").mkdir()
    model = str(folder / "model-bf16.gguf")
    for words in (
        ["quantize", model, str(folder / "model-q8_0.gguf"), "Q8_0"],
        ["quantize", model, str(folder / "ggml-model-Q4_0.gguf"), "Q4_0"],
        ["quantize", model, str(folder / "short.gguf"), "COPY", "--override-kv", "llama.context_length=int:64"],
        ["split", model, str(folder / "set"), "--split-max-tensors", "5"],
        ["imatrix", str(folder / "moe-bf16.gguf"), "-f", str(folder / "calibration.txt"), "--chunks", "1",
         "-o", str(folder / "moe.dat")],
        ["imatrix", model, "-f", str(folder / "calibration.txt"), "--chunks", "1", "-o", str(folder / "dense.dat")],
        ["perplexity", model, "-f", str(folder / "wiki.txt"), "--chunks", "1",
         "--kl-divergence-base", str(folder / "base.kld")],
    ):  # fmt: skip
        assert cli.main([*words, "--json"]) == 0, words
    shutil.copy(folder / "dense.dat", folder / "more.dat")
    return folder


class _Stdin:
    """A stand-in for sys.stdin that holds a text."""

    def __init__(self, text: bytes):
        self.buffer = io.BytesIO(text)


@pytest.mark.parametrize("pasted", LINES, ids=[re.sub(r"\W+", "-", each.line)[:50] for each in LINES])
def test_a_pasted_line_runs(
    pasted: Line, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", _Stdin((folder / "wiki.txt").read_bytes()))
    for name in pasted.files:
        Path(name).unlink(missing_ok=True)
    status = cli.main(shlex.split(pasted.line))
    out, err = capsys.readouterr()
    assert status == 0, err
    for pattern in pasted.out:
        assert re.search(pattern, out, re.M), f"{pattern} is not in\n{out}"
    for pattern in pasted.err:
        assert re.search(pattern, err, re.M), f"{pattern} is not in\n{err}"
    for name in pasted.files:
        assert Path(name).stat().st_size > 0


def test_nothing_is_said_about_options_that_are_not_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for line in ("sweep-bench model-q8_0.gguf -c 16 -b 8", "generate model-q8_0.gguf -p x -n 1 -s 1 -ngl 0"):
        assert cli.main(shlex.split(line)) == 0
        assert "note:" not in capsys.readouterr().err


def test_there_are_forty() -> None:
    assert len(LINES) >= 40
    assert len({each.line for each in LINES}) == len(LINES)


# ---------------------------------------------------------------------------------------------------- what is not taken


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("perplexity -m model-bf16.gguf -mqkvx -f wiki.txt", "No such option: -mqkvx"),
        ("perplexity -m model-bf16.gguf -uge -f wiki.txt", "No such option: -uge"),
        ("bench -m model-bf16.gguf -fa 0,maybe", "'maybe' is not valid"),
        ("bench -m model-bf16.gguf -ctk f16,q9_0", "'q9_0' is not valid"),
        ("bench -m model-bf16.gguf -mla 1,4", "'4' is not valid"),
        ("perplexity -f wiki.txt", "MODEL is missing"),
        ("perplexity model-bf16.gguf -m moe-bf16.gguf -f wiki.txt", "the model is given twice"),
        ("convert HF_DIR a.gguf --outfile b.gguf", "the output is given twice"),
        ("sweep-bench -m model-bf16.gguf --numa spread", "'spread' is not one of"),
        ("repack model-bf16.gguf Q4_0", "'Q4_0' is a type, and OUT is missing"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --individual-tensors 2", "numbers of shards"),
        ("quantize set-00001-of-00005.gguf a.gguf Q4_0 --keep-split --individual-tensors 6", "write 1 to 5"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --only nothing", "found in none of 21 tensor names"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --only blk --keep-split", "--only writes one file"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --skip-first-shard", "goes with --individual-tensors"),
        ("merge a.gguf", "OUT is missing"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --prune-layers 1", "quantkit prune MODEL PRUNED --prune-layers"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --extra-output-tensor q4_0", "makes one when it loads the model"),
        ("quantize model-bf16.gguf a.gguf Q4_0 --symmetric-q40", "drop the option"),
        ("imatrix -m model-bf16.gguf -f wiki.txt -o a.gguf --output-format dat", "write -o a.dat"),
        ("generate -m model-q8_0.gguf -p x -i", "quantkit serve MODEL"),
        ("generate -m model-q8_0.gguf -p x --chat-template chatml", "metadata set MODEL --from-file"),
        ("generate -m model-q8_0.gguf -p x --override-kv a=int:1", "quantkit metadata set MODEL KEY=TYPE:VALUE"),
        ("bench -m model-q8_0.gguf -embd 1", "embeddings are not timed"),
        ("bench -m model-q8_0.gguf -oe md", "there is one output"),
        ("bench -m model-q8_0.gguf -p 64-16*1", "or a range: 16-64"),
        ("bench -m model-q8_0.gguf -ngl 0,some", "'some' is not valid"),
        ("convert HF_DIR a.gguf --vocab-only", "--dry-run. checks the tokenizer"),
        ("perplexity -m model-q8_0.gguf -f wiki.txt -ngl some", "'some' is no number of layers"),
        ("perplexity -m model-q8_0.gguf -f wiki.txt -dev Vulkan0", "write CUDA0,CUDA1 or none"),
        ("perplexity -m model-q8_0.gguf -f wiki.txt -dev CUDA0 --devices cuda:0", "both name the devices"),
        ("perplexity -m model-q8_0.gguf -f wiki.txt --chunks 0", "or -1 for all"),
        ("perplexity -m model-q8_0.gguf -f wiki.txt -c 3", "at least 4, or 0"),
        ("perplexity -m model-q8_0.gguf -hf a/b -f wiki.txt", "-m model-q8_0.gguf and -hf"),
        ("perplexity -hf a/b:Q4_K_M -f wiki.txt", "name the file of Q4_K_M with -hff FILE"),
        ("perplexity -hff b.gguf -f wiki.txt", "add -hf ORG/NAME"),
        ("perplexity -m model-q8_0.gguf --chat no-chat.txt", "or write -f no-chat.txt for a text"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    line: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    message = refused(capsys, *shlex.split(line), status=2)
    assert re.search(said, " ".join(message.split())), message
    assert not Path("a.gguf").exists()


def test_the_model_may_be_given_twice_if_it_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["inspect", "model-q8_0.gguf", "-m", "model-q8_0.gguf", "--no-tensors"]) == 0
    assert "model-q8_0.gguf" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- parts


def test_parts_join_to_the_bytes_of_a_whole_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = str(folder / "model-bf16.gguf")
    assert cli.main(["quantize", source, "whole.gguf", "Q4_0"]) == 0
    for out, *patterns in (("b.gguf", "blk\\.1"), ("a.gguf", "blk\\.0"), ("c.gguf", "^output", "token_embd")):
        flags = [word for pattern in patterns for word in ("--only", pattern)]
        assert cli.main(["quantize", source, out, "Q4_0", *flags]) == 0
    assert "quantkit.part.numbers" in gguf.open("a.gguf").metadata
    assert cli.main(["merge", "b.gguf", "c.gguf", "a.gguf", "joined.gguf"]) == 0
    assert Path("joined.gguf").read_bytes() == Path("whole.gguf").read_bytes()
    assert "3 parts, 21 tensors" in capsys.readouterr().out
    assert "the parts hold 12 of 21 tensors" in refused(capsys, "merge", "b.gguf", "c.gguf", "d.gguf")
    assert "is also in" in refused(capsys, "merge", "a.gguf", "a.gguf", "d.gguf")
    assert "not a part" in refused(capsys, "merge", "whole.gguf", "a.gguf", "d.gguf")
    assert cli.main(["quantize", source, "other.gguf", "Q5_0", "--only", "blk\\.1"]) == 0
    assert "not of one plan" in refused(capsys, "merge", "a.gguf", "other.gguf", "d.gguf")
    assert not Path("d.gguf").exists()


def test_shards_made_one_by_one_are_those_of_one_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with only the shards that are asked for, and the first one, of the input at hand."""
    monkeypatch.chdir(tmp_path)
    for path in folder.glob("set-*.gguf"):
        shutil.copy(path, tmp_path)
    first = "set-00001-of-00005.gguf"
    flags = ["Q4_0", "--pure", "--keep-split"]
    assert cli.main(["quantize", first, "whole.gguf", *flags]) == 0
    assert cli.main(["quantize", first, "one.gguf", *flags, "--individual-tensors", "1,3"]) == 0
    for path in ("set-00002-of-00005.gguf", "set-00003-of-00005.gguf"):
        Path(path).unlink()
    rest = ["--individual-tensors", "4,5", "--skip-first-shard"]
    assert "add --pure" in refused(capsys, "quantize", first, "one.gguf", "Q4_0", "--keep-split", *rest, status=2)
    assert cli.main(["quantize", first, "one.gguf", *flags, *rest]) == 0
    assert sorted(Path().glob("one-*")) == [Path(f"one-0000{n}-of-00005.gguf") for n in (1, 3, 4, 5)]
    for n in (3, 4, 5):
        name = f"0000{n}-of-00005.gguf"
        assert Path(f"one-{name}").read_bytes() == Path(f"whole-{name}").read_bytes()
