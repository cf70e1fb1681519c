"""Wrong answers to the chapter "Quantization" that its checks must reject.

MUTANTS edit the reference (name, old, new, message for the learner), SHORTCUTS are whole answers
that call what the exercise forbids, EQUIVALENT lists automatic mutations that change nothing.
"""

_AFFINE = [
    (
        "range_not_widened",
        "    lo, hi = min(lo, 0.0), max(hi, 0.0)\n",
        "",
        "This is what you get without widening the range to contain 0: the zero point falls "
        "outside the codes, and 0.0 is not represented.",
    ),
    (
        "divides_by_2_to_the_bits",
        "(hi - lo) / (2**bits - 1)",
        "(hi - lo) / 2**bits",
        "This divides by 2**bits. That is the number of codes; the steps between them are one "
        "fewer, as with fence posts.",
    ),
    (
        "zero_point_of_hi",
        "round(-lo / scale)",
        "round(hi / scale)",
        "The zero point counts the steps from lo up to 0, so it is -lo / scale; you count those "
        "from 0 up to hi.",
    ),
    (
        "zero_point_negative",
        "round(-lo / scale)",
        "round(lo / scale)",
        "The zero point has the wrong sign: code 0 stands for lo = scale * (0 - zero), so zero is "
        "-lo / scale.",
    ),
    (
        "zero_point_floored",
        "round(-lo / scale)",
        "int(-lo / scale)",
        "This cuts -lo / scale down to a whole number: round to the nearest.",
    ),
    (
        "zero_point_stays_a_float",
        "round(-lo / scale)",
        "-lo / scale",
        "The zero point must be rounded to an int, so that 0.0 has a code of its own.",
    ),
    (
        "empty_range_divides_by_zero",
        "    if lo == hi:\n        return 1.0, 0\n",
        "",
        "lo = hi = 0 divides by zero here. Such a range has scale 1 and zero point 0.",
    ),
    (
        "any_single_value_is_1_0",
        "    lo, hi = min(lo, 0.0), max(hi, 0.0)\n    if lo == hi:",
        "    if lo == hi:\n        return 1.0, 0\n    lo, hi = min(lo, 0.0), max(hi, 0.0)\n"
        "    if lo == hi:",
        "lo = hi = 2 is not the empty case: widened, the range is 0..2. Widen first, then look.",
    ),
    (
        "order_not_checked",
        "if lo > hi:",
        "if False:",
        "lo above hi must raise ValueError.",
    ),
    (
        "one_bit_accepted",
        "if not 2 <= bits <= 8:",
        "if not 1 <= bits <= 8:",
        "bits = 1 must raise ValueError: the rule is 2..8.",
    ),
    (
        "nine_bits_accepted",
        "if not 2 <= bits <= 8:",
        "if bits < 2:",
        "bits = 9 must raise ValueError: the rule is 2..8.",
    ),
]

_RANGE = """\
        low = groups.amin(2)
        scale = (groups.amax(2) - low) / (2**bits - 1)
"""
_GROUPS = [
    (
        "groups_of_a_column",
        "groups = W.float().reshape(O, I // group, group)",
        "groups = W.float().reshape(O, group, I // group).transpose(1, 2)",
        "Your groups are not neighbours: entries of one group lie I // group columns apart. Let "
        "the last axis of the reshape run over the group.",
    ),
    (
        "one_ruler_for_the_matrix",
        "scale = torch.where(scale == 0, 1.0, scale)",
        "scale = torch.where(scale == 0, 1.0, scale).amax().expand(O, I // group)",
        "All groups use the widest ruler: each group has a scale of its own.",
    ),
    (
        "scale_of_2_to_the_bits",
        "(groups.amax(2) - low) / (2**bits - 1)",
        "(groups.amax(2) - low) / 2**bits",
        "This divides the range by 2**bits: with codes 0..2**bits - 1 there are 2**bits - 1 "
        "steps, and the largest entry gets a code that does not exist.",
    ),
    (
        "symmetric_with_one_more_level",
        "levels = 2 ** (bits - 1) - 1",
        "levels = 2 ** (bits - 1)",
        "At b bits the symmetric codes reach 2**(b-1) - 1, 7 for 4 bits: +8 does not exist.",
    ),
    (
        "largest_not_largest_magnitude",
        "groups.abs().amax(2) / levels",
        "groups.amax(2) / levels",
        "The symmetric scale uses the largest entry; a large negative one then falls off the "
        "ruler. Use the largest magnitude.",
    ),
    (
        "widened_to_zero",
        _RANGE,
        _RANGE.replace("amin(2)", "amin(2).clamp(max=0)").replace(
            "amax(2)", "amax(2).clamp(min=0)"
        ),
        "This widens the range to contain 0, as exercise 1 does. Groups of weights do not: code "
        "0 stands for the smallest entry, whatever its sign.",
    ),
    (
        "zero_rounded",
        "return q.reshape(O, I).to(dtype), scale, (0 - low) / scale",
        "return q.reshape(O, I).to(dtype), scale, ((0 - low) / scale).round()",
        "The zero point is rounded. It stays a float here: that costs no bit of the code, and a "
        "constant group comes back exactly.",
    ),
    (
        "zero_is_the_minimum",
        "return q.reshape(O, I).to(dtype), scale, (0 - low) / scale",
        "return q.reshape(O, I).to(dtype), scale, low",
        "You return the minimum itself. The zero point is counted in steps: -min / scale.",
    ),
    (
        "zero_of_the_wrong_sign",
        "return q.reshape(O, I).to(dtype), scale, (0 - low) / scale",
        "return q.reshape(O, I).to(dtype), scale, low / scale",
        "The zero point has the wrong sign: scale * (0 - zero) must give the minimum.",
    ),
    (
        "floor_instead_of_round",
        ".round()",
        ".floor()",
        "This rounds down. The nearest code halves the largest error: use round.",
    ),
    (
        "cut_off_instead_of_round",
        ".round()",
        "",
        "Converting a float to an integer cuts its fraction off: round first.",
    ),
    (
        "constant_group_divides_by_zero",
        "    scale = torch.where(scale == 0, 1.0, scale)\n",
        "",
        "A constant group has range 0 and its scale divides by zero: use 1 there.",
    ),
    (
        "small_scales_become_1",
        "torch.where(scale == 0, 1.0, scale)",
        "torch.where(scale < 2e-3, 1.0, scale)",
        "A group of small numbers is taken for a constant one. Its scale is small, not 0.",
    ),
    (
        "in_the_dtype_of_W",
        "groups = W.float()",
        "groups = W",
        "Computed in fp16, the range of the group overflows to infinity. Convert to fp32 first.",
    ),
    (
        "always_int8",
        "dtype = torch.uint8",
        "dtype = torch.int8",
        "Codes 128..255 wrap around in int8: asymmetric codes are uint8.",
    ),
    (
        "symmetric_in_uint8",
        "dtype = torch.int8",
        "dtype = torch.uint8",
        "Negative codes wrap around in uint8: symmetric codes are int8.",
    ),
    (
        "overwrites_W",
        "groups = W.float().reshape(O, I // group, group)",
        "groups = W.float().reshape(O, I // group, group).mul_(1.0).sub_(0.5).add_(0.25)",
        "Your W has changed: an operation in place wrote through a view of it.",
    ),
    (
        "ragged_groups",
        "if group < 1 or I % group:",
        "if group < 1 or group > I:",
        "Groups of 4 do not divide 9 columns: raise ValueError (your own, with a message).",
    ),
    (
        "negative_group",
        "if group < 1 or I % group:",
        "if I % (group or 2):",
        "A group of 0 or of -3 must raise ValueError (your own, with a message).",
    ),
    (
        "any_bits",
        "if not 2 <= bits <= 8:",
        "if bits < 2:",
        "bits = 9 must raise ValueError: the codes would not fit their 8 bits.",
    ),
]

_SPREAD = """\
    scale = scale.float().repeat_interleave(group, dim=1)  # [O, I]
    zero = zero.float().repeat_interleave(group, dim=1)
    return scale * (q.float() - zero)"""
_DEQUANTIZE = [
    (
        "repeat_instead_of_interleave",
        "scale = scale.float().repeat_interleave(group, dim=1)",
        "scale = scale.float().repeat(1, group)",
        "`repeat` lays the scales out one after the other, again and again. Neighbours share: "
        "each scale is repeated `group` times before the next, as `repeat_interleave` does.",
    ),
    (
        "zero_added",
        "scale * (q.float() - zero)",
        "scale * (q.float() + zero)",
        "You add the zero point: the entry is scale * (q - zero).",
    ),
    (
        "zero_not_scaled",
        "scale * (q.float() - zero)",
        "scale * q.float() - zero",
        "The zero point is counted in steps: subtract it before you multiply by the scale.",
    ),
    (
        "zero_forgotten",
        "scale * (q.float() - zero)",
        "scale * q.float()",
        "This is right for symmetric codes only: subtract the zero point first.",
    ),
    (
        "in_fp16",
        _SPREAD,
        _SPREAD.replace(".float()", ""),
        "Computed in fp16 when scale and zero are: with a zero point in the thousands, q - zero "
        "keeps hardly a digit of q. Convert to fp32 first.",
    ),
    (
        "returns_fp16",
        "return scale * (q.float() - zero)",
        "return (scale * (q.float() - zero)).half()",
        "The result is fp16: return fp32, whatever the dtype of the scales.",
    ),
    (
        "shapes_not_checked",
        "if t.shape[1] * group != q.shape[1]:",
        "if t.shape[1] > q.shape[1]:",
        "Scales for 4 of the 6 columns must raise ValueError (your own, with a message).",
    ),
    (
        "only_scale_checked",
        '(("scale", scale), ("zero", zero))',
        '(("scale", scale),)',
        "A zero point for 3 of the 6 columns must raise ValueError too.",
    ),
]

_REPORT = [
    (
        "kl_the_other_way",
        "(log_p.exp() * (log_p - log_q))",
        "(log_q.exp() * (log_q - log_p))",
        "This is KL(quant || base). The original is the truth here: weigh the differences of the "
        "logarithms by base's probabilities.",
    ),
    (
        "kl_in_bits",
        "(log_p.exp() * (log_p - log_q)).sum(1).mean()",
        "(log_p.exp() * (log_p - log_q)).sum(1).mean() / 0.6931471805599453",
        "This is the divergence in bits: use the natural logarithm.",
    ),
    (
        "kl_over_words_too",
        "(log_p.exp() * (log_p - log_q)).sum(1).mean()",
        "(log_p.exp() * (log_p - log_q)).mean()",
        "You average over the vocabulary too: sum over the V words, then average over the N "
        "tokens.",
    ),
    (
        "ratio_upside_down",
        "gain = (log_p - log_q)",
        "gain = (log_q - log_p)",
        "This is base over quant. ppl_ratio is above 1 when the quantized model is worse.",
    ),
    (
        "ratio_is_a_difference",
        "float(gain.exp())",
        "float(gain)",
        "This is the difference of the mean losses: perplexity is its exponential.",
    ),
    (
        "mean_of_ratios",
        "gain = (log_p - log_q)[rows, target].mean()",
        "gain = (log_p - log_q)[rows, target].exp().mean().log()",
        "You average the ratios of probabilities. Perplexity averages the logarithms first.",
    ),
    (
        "right_to_wrong_only",
        "((best_p == target) != (best_q == target)).sum()",
        "((best_p == target) & (best_q != target)).sum()",
        "You count answers that became wrong. One that became right is a flip too.",
    ),
    (
        "any_change_is_a_flip",
        "((best_p == target) != (best_q == target)).sum()",
        "(best_p != best_q).sum()",
        "You count every change of the most likely token. From one wrong token to another is no "
        "flip: exactly one of the two must hit the target.",
    ),
    (
        "flips_as_a_share",
        '"flips": int(((best_p == target) != (best_q == target)).sum())',
        '"flips": float(((best_p == target) != (best_q == target)).float().mean())',
        "`flips` is a count, not a share.",
    ),
    (
        "agree_as_a_count",
        "(best_p == best_q).float().mean()",
        "(best_p == best_q).sum()",
        "`agree` is the share of places, between 0 and 1, not their number.",
    ),
    (
        "agree_with_the_target",
        "float((best_p == best_q)",
        "float((target == best_q)",
        "This is the accuracy of the quantized model. `agree` compares the two models, target or "
        "not.",
    ),
    (
        "in_fp16",
        "    log_p = base.float().log_softmax(1)  # [N, V]\n    log_q = quant.float()",
        "    log_p = base.log_softmax(1)  # [N, V]\n    log_q = quant",
        "The logarithms are computed in fp16, where a loss of 200 is rounded to an eighth: "
        "convert to fp32.",
    ),
    (
        "softmax_overflows",
        "log_q = quant.float().log_softmax(1)",
        "log_q = (quant.float().exp() / quant.float().exp().sum(-1, keepdim=True)).log()",
        "exp overflows for large logits: use log_softmax, which takes the maximum out first.",
    ),
    (
        "nothing_accepted",
        "if len(target) == 0:",
        "if False:",
        "With no token every mean is NaN: raise ValueError.",
    ),
    (
        "targets_cut_off",
        "or base.shape[:1] != target.shape",
        "or base.shape[0] > len(target)",
        "More targets than rows must raise ValueError: something was aligned wrongly.",
    ),
    (
        "quant_not_checked",
        "base.shape != quant.shape or base",
        "base",
        "base and quant of different shapes must raise ValueError (your own, with a message).",
    ),
]

_SMOOTH = [
    (
        "the_other_way",
        "x**alpha / w ** (1 - alpha)",
        "w ** (1 - alpha) / x**alpha",
        "This is 1 / s: it would multiply the activations, whose outliers are the trouble. The "
        "exact product does not notice, the rounded one does.",
    ),
    (
        "alpha_for_both",
        "w ** (1 - alpha)",
        "w**alpha",
        "The exponents of x and w add up to 1: w has 1 - alpha.",
    ),
    (
        "alpha_exchanged",
        "x**alpha / w ** (1 - alpha)",
        "x ** (1 - alpha) / w**alpha",
        "alpha and 1 - alpha are exchanged: alpha = 1 moves all of the difficulty to the weights.",
    ),
    (
        "multiplied",
        "1.0, x**alpha / w",
        "1.0, x**alpha * w",
        "A channel with large weights should take less: divide by w ** (1 - alpha).",
    ),
    (
        "idle_weights_forgotten",
        "idle = (x == 0) | (w == 0)",
        "idle = x == 0",
        "A channel whose weights are all 0 divides by zero: its divisor is 1.",
    ),
    (
        "idle_inputs_forgotten",
        "idle = (x == 0) | (w == 0)",
        "idle = w == 0",
        "A channel whose activations are all 0 has the divisor 1, whatever alpha is.",
    ),
    (
        "idle_only_if_both",
        "(x == 0) | (w == 0)",
        "(x == 0) & (w == 0)",
        "The divisor is 1 if either of the two maxima is 0, not only if both are.",
    ),
    (
        "idle_is_zero",
        "torch.where(idle, 1.0,",
        "torch.where(idle, 0.0,",
        "An idle channel gets the divisor 0: use 1, which changes nothing.",
    ),
    (
        "small_counts_as_idle",
        "(w == 0)",
        "(w < 0.02)",
        "A channel with small weights is not idle; only an exact 0 is.",
    ),
    (
        "in_fp16",
        "x, w = x_absmax.float(), w_absmax.float()",
        "x, w = x_absmax, w_absmax",
        "Computed in fp16: convert to fp32 first, and return fp32.",
    ),
    (
        "shapes_broadcast",
        "if x_absmax.shape != w_absmax.shape:",
        "if len(x_absmax) > 1 and x_absmax.shape != w_absmax.shape:",
        "One number for all channels is silently spread here: raise ValueError if shapes differ.",
    ),
    (
        "alpha_not_checked",
        "if not 0 <= alpha <= 1:",
        "if alpha < 0:",
        "alpha above 1 must raise ValueError.",
    ),
    (
        "negative_alpha",
        "if not 0 <= alpha <= 1:",
        "if alpha > 1:",
        "alpha below 0 must raise ValueError.",
    ),
]

_LOOP = """\
    for j in range(K):
        codes = ((work[:, j] - low) / scale).round().clamp(0, 2**bits - 1)
        w_hat = codes * scale + low
        error = (work[:, j] - w_hat) / U[j, j]
        work[:, j + 1 :] -= error[:, None] * U[j, j + 1 :]
        work[:, j] = w_hat
"""
_U = "U = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)"
_GPTQ = [
    (
        "round_to_nearest",
        "        work[:, j + 1 :] -= error[:, None] * U[j, j + 1 :]\n",
        "",
        "This is plain rounding: nothing is compensated in the columns to come. (A lower "
        "triangular U does that too: it has nothing to the right of its diagonal.)",
    ),
    (
        "factor_of_H",
        _U,
        "U = torch.linalg.cholesky(damped, upper=True)",
        "U factors H here. What tells how later columns can make up for an error is the inverse: "
        "H^-1 = U^T U.",
    ),
    (
        "inverse_itself",
        _U,
        "U = torch.linalg.inv(damped)",
        "This uses H^-1 itself. Its row j is right for the first column only; after that, the "
        "columns already fixed must be taken out, which the triangular factor does.",
    ),
    (
        "lower_factor_transposed_product",
        _U,
        "U = torch.linalg.inv(torch.linalg.cholesky(damped, upper=True))",
        "This U satisfies H^-1 = U U^T. The factors must stand the other way round: U^T U.",
    ),
    (
        "not_divided_by_the_diagonal",
        "error = (work[:, j] - w_hat) / U[j, j]",
        "error = work[:, j] - w_hat",
        "The error is not divided by U[j, j]: what column k loses is a ratio, U[j, k] / U[j, j].",
    ),
    (
        "compensation_of_the_wrong_sign",
        "work[:, j + 1 :] -= error",
        "work[:, j + 1 :] += error",
        "Later columns add to the error instead of making up for it: subtract.",
    ),
    (
        "ruler_of_each_column",
        _LOOP,
        _LOOP.replace(
            "        codes =",
            "        low = work[:, j:].amin(1)\n"
            "        scale = (work[:, j:].amax(1) - low) / (2**bits - 1)\n"
            "        scale = torch.where(scale == 0, 1.0, scale)\n"
            "        codes =",
        ),
        "The ruler is computed anew at every column, from weights already changed. A row has one "
        "scale and one minimum, those of the original W.",
    ),
    (
        "not_clipped",
        ".round().clamp(0, 2**bits - 1)",
        ".round()",
        "A compensated weight left the ruler: its code is below 0 or above 2**bits - 1. Clip.",
    ),
    (
        "levels_of_2_to_the_bits",
        "scale = (work.amax(1) - low) / (2**bits - 1)",
        "scale = (work.amax(1) - low) / 2**bits",
        "The range of a row is divided by 2**bits; there are 2**bits - 1 steps.",
    ),
    (
        "one_ruler_for_the_matrix",
        "low = work.amin(1)  # [O]",
        "low = work.amin().expand(O)",
        "One minimum for the whole matrix: each row has its own ruler.",
    ),
    (
        "no_damping",
        "damped = H.double() + damp * H.double().diag().mean() * torch.eye(K)",
        "damped = H.double()",
        "H is not damped: add damp times the mean of its diagonal to the diagonal.",
    ),
    (
        "damping_not_relative",
        "damp * H.double().diag().mean() * torch.eye(K)",
        "damp * torch.eye(K)",
        "The damping is absolute: it must be a share of the mean of H's diagonal, so that the "
        "scale of H does not matter.",
    ),
    (
        "damping_everywhere",
        "* torch.eye(K)",
        "* torch.ones(K, K)",
        "The damping is added to every entry of H: only the diagonal gets it.",
    ),
    (
        "overwrites_W",
        "work = W.double().clone()",
        "work = W.double()",
        "Your W has changed: `.double()` of an fp64 tensor is the tensor itself. Clone it.",
    ),
    (
        "returns_fp64",
        "return work.to(W.dtype)",
        "return work",
        "Return the rounded weights in W's dtype.",
    ),
    (
        "constant_row",
        "    scale = torch.where(scale == 0, 1.0, scale)\n",
        "",
        "A constant row divides by zero: its scale is 1.",
    ),
    (
        "compensates_from_the_next_but_one",
        "work[:, j + 1 :] -= error[:, None] * U[j, j + 1 :]",
        "work[:, j + 2 :] -= error[:, None] * U[j, j + 2 :]",
        "The column right after j is left out: compensate from column j + 1 on.",
    ),
    (
        "H_not_checked",
        "if H.shape != (K, K):",
        "if H.shape[0] > K:",
        "An H that is not [K, K] must raise ValueError (your own, with a message).",
    ),
    (
        "any_bits",
        "if not 2 <= bits <= 8:",
        "if bits > 8:",
        "bits = 1 must raise ValueError: the rule is 2..8.",
    ),
]

_PACK = [
    (
        "halves_exchanged",
        "q[:, 0::2] | q[:, 1::2] << 4",
        "q[:, 0::2] << 4 | q[:, 1::2]",
        "Low and high are exchanged: the even column goes into the low four bits.",
    ),
    (
        "front_and_back",
        "q[:, 0::2] | q[:, 1::2] << 4",
        "q[:, : q.shape[1] // 2] | q[:, q.shape[1] // 2 :] << 4",
        "This pairs column i with column i + I / 2. A byte holds two neighbours, 2i and 2i + 1.",
    ),
    (
        "rows_paired",
        "q[:, 0::2] | q[:, 1::2] << 4",
        "(q.T.reshape(q.shape[1] // 2, 2, -1)[:, 0] | q.T.reshape(q.shape[1] // 2, 2, -1)[:, 1]"
        " << 4)",
        "The result is transposed: byte i of row o holds columns 2i and 2i + 1 of row o.",
    ),
    (
        "shift_of_three",
        "<< 4",
        "<< 3",
        "A shift of 3 makes the two codes overlap: each has four bits.",
    ),
    (
        "in_a_wider_type",
        "q[:, 0::2] | q[:, 1::2] << 4",
        "q[:, 0::2] + 16 * q[:, 1::2].int()",
        "The bytes are stored in a wider dtype: two codes then take as much room as before. "
        "Return uint8.",
    ),
    (
        "shifts_in_place",
        "q[:, 0::2] | q[:, 1::2] << 4",
        "q[:, 0::2] | q[:, 1::2].mul_(16)",
        "Your input has changed: the shift wrote in place.",
    ),
    (
        "odd_columns",
        "if q.shape[1] % 2:",
        "if q.shape[1] % 2 and q.shape[1] < 2:",
        "Three columns must raise ValueError (your own, with a message): the last one has no "
        "partner.",
    ),
    (
        "sixteen_accepted",
        "if (q > 15).any():",
        "if (q > 16).any():",
        "A code of 16 needs five bits and spills into its neighbour: raise ValueError.",
    ),
    (
        "large_codes_accepted",
        "if (q > 15).any():",
        "if (q == 16).any():",
        "A code of 255 must raise ValueError: everything above 15 does.",
    ),
    (
        "large_codes_cut",
        '        raise ValueError(f"q holds {int(q.max())}: must not exceed 15")\n',
        "        q = q & 15\n",
        "A code above 15 is silently cut to its low four bits: raise ValueError.",
    ),
]

_UNPACK = [
    (
        "halves_exchanged",
        "(packed & 15, packed >> 4)",
        "(packed >> 4, packed & 15)",
        "Low and high are exchanged: the low four bits are the even column.",
    ),
    (
        "front_and_back",
        "torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)",
        "torch.cat((packed & 15, packed >> 4), dim=1)",
        "All low halves come first, then all high ones. The two codes of a byte are neighbours: "
        "columns 2i and 2i + 1.",
    ),
    (
        "low_not_masked",
        "(packed & 15, packed >> 4)",
        "(packed, packed >> 4)",
        "The even codes still carry the high four bits: mask with 15.",
    ),
    (
        "high_not_shifted",
        "(packed & 15, packed >> 4)",
        "(packed & 15, packed & 240)",
        "The odd codes are 16 times too large: shift the high four bits down.",
    ),
    (
        "shift_of_three",
        "packed >> 4",
        "packed >> 3",
        "A shift of 3 leaves one bit of the low code behind: each has four bits.",
    ),
    (
        "in_a_wider_type",
        "(packed & 15, packed >> 4)",
        "(packed.int() & 15, packed.int() >> 4)",
        "The codes are returned in a wider dtype: return uint8.",
    ),
    (
        "shifts_in_place",
        "(packed & 15, packed >> 4)",
        "(packed & 15, packed.div_(16, rounding_mode='floor'))",
        "Your input has changed: the shift wrote in place.",
    ),
]

_KERNEL = [
    (
        "zero_ignored",
        "acc += scale * (dots - zero * sums)",
        "acc += scale * dots",
        "The zero points are not subtracted: s * (sum(code * x) - z * sum(x)).",
    ),
    (
        "zero_not_scaled",
        "acc += scale * (dots - zero * sums)",
        "acc += scale * dots - zero * sums",
        "The zero point is counted in steps of the scale: subtract it before you multiply.",
    ),
    (
        "zero_without_x",
        "acc += scale * (dots - zero * sums)",
        "acc += scale * (dots - zero * SEG)",
        "Each zero point is subtracted once per weight, times that weight's x: z * sum(x), not z "
        "times the number of weights.",
    ),
    (
        "one_ruler_per_row",
        "o_g = (k + tl.arange(0, SEGS) * SEG) // GROUP",
        "o_g = (k * 0 + tl.arange(0, SEGS) * 0) // GROUP",
        "Every segment uses the first scale of the row: that of column k is number k // GROUP.",
    ),
    (
        "a_ruler_per_segment",
        "o_g = (k + tl.arange(0, SEGS) * SEG) // GROUP",
        "o_g = (k + tl.arange(0, SEGS) * SEG) // SEG",
        "Scales are looked up by segment. Several segments share one where GROUP is larger than "
        "SEG: divide the column by GROUP.",
    ),
    (
        "high_code_first",
        "code = b_w & (15 << (4 * j))  # code * 16**j\n"
        "            dots += code * (b_xs[j] * 0.0625**j)[None, :]",
        "code = (b_w >> (4 * (7 - j))) & 15\n            dots += code * b_xs[j][None, :]",
        "The codes are read from the highest four bits down. The first of eight columns lies in "
        "the lowest four bits of its word.",
    ),
    (
        "bytes_exchanged",
        "code = b_w & (15 << (4 * j))  # code * 16**j\n"
        "            dots += code * (b_xs[j] * 0.0625**j)[None, :]",
        "code = (b_w >> (4 * (j ^ 1))) & 15\n            dots += code * b_xs[j][None, :]",
        "The two codes of each byte are exchanged: the even column lies in the low four bits.",
    ),
    (
        "not_shifted_down",
        "(b_xs[j] * 0.0625**j)",
        "b_xs[j]",
        "The masked bits were not shifted down: code j counts 16**j times too much.",
    ),
    (
        "signed_words",
        "        b_w = b_w.to(tl.uint32)\n",
        "",
        "Words are read as signed: the eighth code of a word is negative where its highest bit "
        "is set.",
    ),
    (
        "past_the_end_of_K",
        "b_x = tl.load(x + o_k, mask=o_k < K, other=0.0)",
        "b_x = tl.load(x + o_k)",
        "x is read past its end: the last step has fewer than BLOCK_K columns. Mask the load and "
        "put 0 there.",
    ),
    (
        "tail_dropped",
        "span = tl.cdiv(K, n_splits * BLOCK_K) * BLOCK_K",
        "span = K // (n_splits * BLOCK_K) * BLOCK_K",
        "The columns that do not fill a step are lost: round up.",
    ),
    (
        "splits_overlap",
        "start = split * span",
        "start = split * 0",
        "Every split starts at column 0, so columns are counted several times.",
    ),
    (
        "rows_past_the_end_stored",
        "tl.sum(acc, 1), mask=o_n < N)",
        "tl.sum(acc, 1))",
        "Rows beyond N are stored too: they overwrite the next split, or memory that is not yours.",
    ),
    (
        "words_by_bytes",
        "w_row = words + o_n[:, None] * (s_w * 4)",
        "w_row = words + o_n[:, None] * (s_w * 16)",
        "The stride of a row is counted in quads of four words, and `words` is a pointer to "
        "words: multiply s_w by 4.",
    ),
    (
        "strides_of_scales_for_zeros",
        "z_row = zeros + o_n[:, None] * s_z",
        "z_row = zeros + o_n[:, None] * s_s",
        "The zero points are read with the stride of the scales. The two may be laid out "
        "differently: use s_z.",
    ),
    (
        "rows_of_32_bits",
        "tl.program_id(0).to(tl.int64)",
        "tl.program_id(0)",
        "Row times stride is a product of two 32-bit numbers: widen one with .to(tl.int64).",
    ),
    (
        "in_16_bits",
        "acc += scale * (dots - zero * sums)",
        "acc += scale * dots - (scale * zero) * sums",
        "scale * zero is rounded to fp16 here, and with a zero point far from all codes that "
        "rounding is larger than a code. Convert to fp32 first, or subtract first.",
    ),
]

# Found by somebody who solved the chapter from its notebook alone, and then tried to fool it.
_AFFINE += [
    (
        "narrow_counts_as_empty",
        "if lo == hi:",
        "if hi - lo < 1e-3:",
        "A narrow range is not an empty one: only lo = hi = 0 has scale 1.",
    ),
    (
        "scale_has_a_floor",
        "scale = (hi - lo) / (2**bits - 1)",
        "scale = max((hi - lo) / (2**bits - 1), 1e-6)",
        "A narrow range has a small scale: do not bound it from below.",
    ),
]
_GROUPS += [
    (
        "tiny_scales_become_1",
        "torch.where(scale == 0, 1.0, scale)",
        "torch.where(scale < 1e-6, 1.0, scale)",
        "A group of tiny numbers is taken for a constant one. Its scale is tiny, not 0.",
    ),
    (
        "scale_has_a_floor",
        "torch.where(scale == 0, 1.0, scale)",
        "scale.clamp(min=1e-8)",
        "A constant group has scale 1 here, and a group of tiny numbers a tiny scale: replace an "
        "exact 0, do not bound the scale from below.",
    ),
]
_DEQUANTIZE += [
    (
        "repeat_for_both",
        _SPREAD,
        _SPREAD.replace("repeat_interleave(group, dim=1)", "repeat(1, group)"),
        "`repeat` lays the rulers out one after the other, again and again. Neighbours share: "
        "each is repeated `group` times before the next, as `repeat_interleave` does.",
    ),
    (
        "zero_rounded",
        "(q.float() - zero)",
        "(q.float() - zero.round())",
        "The zero point is no code and must not be rounded.",
    ),
    (
        "only_zero_checked",
        '(("scale", scale), ("zero", zero))',
        '(("zero", zero),)',
        "A scale for 3 of the 6 columns must raise ValueError too.",
    ),
    (
        "columns_cut_off",
        "if t.shape[1] * group != q.shape[1]:",
        "if t.shape[1] != q.shape[1] // group:",
        "Groups of 4 do not cover 6 columns: the last two have no scale. Raise ValueError.",
    ),
]
_DEQUANTIZE += [
    (
        "zeros_changed",
        _SPREAD,
        "    zero.mul_(scale)\n" + _SPREAD.replace("(q.float() - zero)", "q.float() - zero"),
        "The zero points that you were given have changed: a second call would give other weights.",
    ),
]
_REPORT += [
    (
        "logits_changed",
        "log_p = base.float().log_softmax(1)",
        "log_p = base.float().sub_(base.float().logsumexp(1, keepdim=True))",
        "Your logits have changed: `.float()` of an fp32 tensor is the tensor itself, and an "
        "operation in place wrote through it.",
    ),
]
_GROUPS += [
    (
        "fp64_scales",
        "groups = W.float()",
        "groups = W.to(torch.promote_types(W.dtype, torch.float32))",
        "Scales and zero points are fp32 for every W, for one in fp64 too.",
    ),
]
_SMOOTH += [
    (
        "never_below_1",
        "x**alpha / w ** (1 - alpha))",
        "(x**alpha / w ** (1 - alpha)).clamp(min=1))",
        "A divisor may be below 1: a channel that is small in the activations is made larger.",
    ),
    (
        "tiny_counts_as_idle",
        "(x == 0)",
        "(x < 1e-4)",
        "A channel with tiny activations is not idle; only an exact 0 is.",
    ),
    (
        "maxima_changed",
        "    idle = (x == 0) | (w == 0)\n",
        "    idle = (x == 0) | (w == 0)\n    x[idle] = w[idle] = 1.0\n",
        "The maxima that you were given have changed: `.float()` of an fp32 tensor is the tensor "
        "itself. Use torch.where, or clone.",
    ),
]
_GPTQ += [
    (
        "unused_inputs_zeroed",
        "    low = work.amin(1)  # [O]\n",
        "    work[:, H.diag() == 0] = 0.0\n    low = work.amin(1)  # [O]\n",
        "A column whose input is never used is set to 0 here. It is rounded like the others.",
    ),
    (
        "damps_the_caller",
        "damped = H.double() + damp * H.double().diag().mean() * torch.eye(K)",
        "damped = H.double()\n"
        "    H.diagonal().add_(damp * H.diagonal().mean())\n"
        "    damped = H.double()",
        "Your H has changed: the damping wrote into the matrix that you were given, and a second "
        "call would damp twice.",
    ),
    (
        "inverse_in_fp32",
        _U,
        "U = torch.linalg.cholesky(torch.linalg.inv(damped.float()).double(), upper=True)",
        "H is inverted in fp32. Inputs that move together make it nearly singular, and fp32 has "
        "no digits left: use fp64.",
    ),
]
_KERNEL += [
    (
        "x_in_fp16",
        "other=0.0).to(tl.float32)",
        "other=0.0).to(tl.float16).to(tl.float32)",
        "x is squeezed through fp16, and a bf16 x may be larger than fp16 can hold: convert it to "
        "fp32.",
    ),
    (
        "nothing_beyond_K",
        "b_x = tl.load(x + o_k, mask=o_k < K, other=0.0)",
        "b_x = tl.load(x + o_k, mask=o_k < K)",
        "Beyond K the load gives anything, NaN for example: say `other=0.0`, so that there the "
        "products are 0.",
    ),
    (
        "every_split_does_it_all",
        "span = tl.cdiv(K, n_splits * BLOCK_K) * BLOCK_K\n    start = split * span",
        "span = tl.cdiv(K, BLOCK_K) * BLOCK_K\n    start = split * 0",
        "Every split adds up all of K: each has its own run of columns.",
    ),
]

MUTANTS = {
    "affine_params": _AFFINE,
    "quantize_groups": _GROUPS,
    "dequantize": _DEQUANTIZE,
    "behaviour_report": _REPORT,
    "smooth_scales": _SMOOTH,
    "gptq": _GPTQ,
    "pack_nibbles": _PACK,
    "unpack_nibbles": _UNPACK,
    "w4a16_gemv_kernel": _KERNEL,
}

_LIBRARY = "The library's quantizer is this exercise's answer: compute scale, zero and codes."
_TORCH_BODY = """\
@triton.jit
def w4a16_gemv_kernel(
    x, words, scales, zeros, part, N, n_quads, s_w, s_s, s_z,
    GROUP: tl.constexpr, SEG: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    tl.store(part, torch.zeros(1))
"""
SHORTCUTS = {
    "quantize_groups": [
        (
            name,
            "def quantize_groups(W, bits, group, symmetric):\n"
            f"    q = torch.{name}(W, 1.0, 0, torch.quint8)\n"
            "    return q.int_repr(), torch.ones(1, 1), torch.zeros(1, 1)\n",
            _LIBRARY,
        )
        for name in ("quantize_per_tensor", "quantize_per_channel")
    ]
    + [
        (
            "torch_ao",
            "from torch.ao.quantization import MinMaxObserver\n\n\n"
            "def quantize_groups(W, bits, group, symmetric):\n"
            "    return MinMaxObserver()(W), None, None\n",
            _LIBRARY,
        ),
        (
            "torchao",
            "def quantize_groups(W, bits, group, symmetric):\n"
            "    import torchao\n\n"
            "    return torchao.quantize_(W), None, None\n",
            _LIBRARY,
        ),
    ],
    "w4a16_gemv_kernel": [
        ("torch", _TORCH_BODY, "A kernel's body may name only tl, its parameters and variables."),
    ],
}

_MESSAGE = "changes only the words of the error message"
EQUIVALENT: dict[str, dict[str, str]] = {
    "dequantize": {
        "constant#3: 1 to 0": _MESSAGE,
        "constant#4: 1 to 0": _MESSAGE,
    },
    "gptq": {
        "constant#10: 1.0 to 2.0": "a constant row has code 0 and error 0 whatever its scale",
    },
    "pack_nibbles": {
        "constant#3: 1 to 0": _MESSAGE,
        "q.max#1: max to min": _MESSAGE,
    },
}
