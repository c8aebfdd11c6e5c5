"""Ids, names and sizes of every tensor type that GGUF files of llama.cpp and ik_llama.cpp hold, and of activations.

A reader must know the size of a tensor to find the next one, whether or not it can decode it. The numbers are those of
ik_llama.cpp and llama.cpp: no id has one meaning for the one program and another for the other. Id 41 has two names,
q1_0_g128 and llama.cpp's q1_0. The file of a type replaces its line here by a record with codecs, and the two must
agree. That file is imported when the type is first used. It is named like the type, except for those in _MODULES.
"""

from __future__ import annotations

from quantkit.types.base import IK, LLAMA_CPP, define_layout, ids

# id name block bytes [row header]
_TABLE = """
0 f32 1 4
1 f16 1 2
2 q4_0 32 18
3 q4_1 32 20
6 q5_0 32 22
7 q5_1 32 24
8 q8_0 32 34
9 q8_1 32 36
10 q2_K 256 84
11 q3_K 256 110
12 q4_K 256 144
13 q5_K 256 176
14 q6_K 256 210
15 q8_K 256 296
16 iq2_xxs 256 66
17 iq2_xs 256 74
18 iq3_xxs 256 98
19 iq1_s 256 50
20 iq4_nl 32 18
21 iq3_s 256 110
22 iq2_s 256 82
23 iq4_xs 256 136
24 i8 1 1
25 i16 1 2
26 i32 1 4
27 i64 1 8
28 f64 1 8
29 iq1_m 256 56
30 bf16 1 2
31 q4_0_4x4 32 18
32 q4_0_4x8 32 18
33 q4_0_8x8 32 18
34 tq1_0 256 54
35 tq2_0 256 66
36 i2_s 128 32 32
39 mxfp4 32 17
40 nvfp4 64 36
41 q1_0_g128 128 18
42 q2_0 64 18
97 q8_0_x4 32 34
98 q8_1_x4 32 36
99 q8_2_x4 32 36
133 q6_0 32 26
134 iq1_bn 64 13 2
135 iq2_bn 64 16 4
136 q8_K64 64 64 32
137 iq2_k 256 76
138 iq3_k 256 110
139 iq4_k 256 144
140 iq5_k 256 176
141 iq6_k 256 212
144 iq4_ks 256 136 4
145 iq2_ks 256 70 2
146 iq4_kss 256 128 4
147 q8_K16 64 64 20
148 q8_K32 256 296
149 q8_KR8 256 296
150 q8_K128 128 140
151 q8_KV 32 32 8
152 iq5_ks 256 168 4
153 iq2_kt 256 68 4
154 iq3_kt 256 100 4
155 iq4_kt 256 128 4
156 iq3_ks 256 102 2
157 iq2_kl 256 86 2
158 iq1_kt 256 56 4
202 q4_0_r8 32 18
206 q5_0_r4 32 22
208 q8_0_r8 32 34
210 q2_k_r4 256 84
211 q3_k_r4 256 110
212 q4_k_r4 256 144
213 q5_k_r4 256 176
214 q6_k_r4 256 210
216 iq2_xxs_r4 256 66
217 iq2_xs_r4 256 74
218 iq3_xxs_r4 256 98
219 iq1_s_r4 32 6 2
220 iq4_nl_r4 32 18
221 iq3_s_r4 256 110
222 iq2_s_r4 256 82
223 iq4_xs_r8 256 136
229 iq1_m_r4 32 7 2
230 bf16_r16 1 2
233 q6_0_r4 32 26
335 iq2_bn_r4 64 16 4
337 iq2_k_r4 256 76
338 iq3_k_r4 256 110
339 iq4_k_r4 256 144
340 iq5_k_r4 256 176
344 iq4_ks_r4 256 136 4
352 iq5_ks_r4 256 168 4
353 mxfp4_r8 32 17
397 q8_k_r16 256 258
398 q8_KV_r8 32 32 4
399 q8_k_r8 256 258
"""


# Modules with the codecs of several types; types under "" have no codec. All others: a module of the type's own name.
_MODULES = {
    "": ["i8", "i16", "i32", "i64", "f64"],
    "floats": ["f32", "f16", "bf16"],
    "q4_0_4x4": ["q4_0_4x4", "q4_0_4x8", "q4_0_8x8"],
    "q8_k_r8": ["q8_k_r8", "q8_k_r16"],
    "activation": ["q8_1", "q8_K", "q8_0_x4", "q8_1_x4", "q8_2_x4", "q8_K64", "q8_K16", "q8_K32", "q8_KR8", "q8_K128"],
}


# Types that both programs read, and those of llama.cpp alone; ik_llama.cpp alone reads the others.
_SHARED = set(
    [
        "f32",
        "f16",
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "q8_0",
        "q2_K",
        "q3_K",
        "q4_K",
        "q5_K",
        "q6_K",
        "iq2_xxs",
        "iq2_xs",
        "iq3_xxs",
        "iq1_s",
        "iq4_nl",
        "iq3_s",
        "iq2_s",
        "iq4_xs",
        "i8",
        "i16",
        "i32",
        "i64",
        "f64",
        "iq1_m",
        "bf16",
        "mxfp4",
        "q1_0_g128",
    ]
)
_OF_LLAMA_CPP = {"tq1_0", "tq2_0", "nvfp4", "q2_0"}
_OTHER_NAMES = {"q1_0": "q1_0_g128"}


def define() -> None:
    """Enter every type of the table in the registry."""
    modules = {name: module for module, names in _MODULES.items() for name in names}
    for line in _TABLE.split("\n"):
        if line:
            number, name, *sizes = line.split()
            module = modules.get(name, name.lower())
            define_layout(module, _readers(name, module), int(number), name, *(int(size) for size in sizes))
    for name, own in _OTHER_NAMES.items():
        ids[name] = ids[own]


def _readers(name: str, module: str) -> tuple[str, ...]:
    if module == "activation":
        return ()
    return (IK, LLAMA_CPP) if name in _SHARED else (LLAMA_CPP,) if name in _OF_LLAMA_CPP else (IK,)
