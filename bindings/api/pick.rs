//! Which kernel a call takes.
//!
//! Kernels of one node are without what goes on between nodes, and those of plain calls without what other calls need:
//! code that is not there is neither fetched nor stepped over. What they take for granted is written down in
//! kernels/common/plain.cuh; here is asked whether it holds. Ranks of one epoch may take different ones.

use super::format::Partial;
use crate::base::Dtype;
use crate::ffi::layout as raw;

/// A launch that sends and receives.
pub(super) const BOTH_PHASES: u32 = raw::TY_PHASE_SEND | raw::TY_PHASE_RECEIVE;

/// A kernel for one node, and the same for several.
type Pair = (&'static str, &'static str);

/// Dispatch's kernel for a launch, and the shared memory that a block of it has, in bytes.
pub(super) fn dispatch(args: &raw::ty_dispatch_args) -> (&'static str, u32) {
    if args.context.regions.own_rows.source_stride != 0 {
        return ("ty_dispatch_in_place", raw::TY_DISPATCH_IN_PLACE_SHARED_BYTES);
    }
    let plain = is_plain(&args.context, args.phases) && args.output.zero_padding == 0;
    let quantizes = plain && args.context.quantize != raw::TY_QUANTIZE_NONE;
    let kernel = match args.output.layout {
        raw::TY_LAYOUT_CONTIGUOUS if quantizes => {
            ("ty_dispatch_quantize_contiguous", "ty_dispatch_quantize_contiguous_nodes")
        }
        raw::TY_LAYOUT_MASKED if quantizes => ("ty_dispatch_quantize_masked", "ty_dispatch_quantize_masked_nodes"),
        _ if quantizes => ("ty_dispatch", "ty_dispatch_nodes"),
        raw::TY_LAYOUT_CONTIGUOUS if plain => ("ty_dispatch_plain_contiguous", "ty_dispatch_plain_contiguous_nodes"),
        raw::TY_LAYOUT_MASKED if plain => ("ty_dispatch_plain_masked", "ty_dispatch_plain_masked_nodes"),
        raw::TY_LAYOUT_TOKEN if plain => ("ty_dispatch_plain_token", "ty_dispatch_plain_token_nodes"),
        _ => ("ty_dispatch", "ty_dispatch_nodes"),
    };
    let shared = (raw::TY_DISPATCH_SHARED_BYTES, raw::TY_DISPATCH_NODES_SHARED_BYTES);
    (of_world(&args.context, kernel), of_world(&args.context, shared))
}

/// Combine's kernel for a launch, where the experts' rows are of `dtype`.
pub(super) fn combine(args: &raw::ty_combine_args, dtype: Dtype, partial: Partial) -> &'static str {
    let plain = is_plain(&args.context, args.phases) && args.out_dtype == raw::TY_BF16 && args.accumulate == 0;
    let late = args.context.weights == raw::TY_WEIGHTS_COMBINE;
    // There are no tags then.
    let arrive = args.context.regions.partial_tags.source_stride == 0;
    let kernel: Pair = match (dtype, partial) {
        (Dtype::Fp16, Partial::Same) => ("ty_combine_fp16", "ty_combine_fp16_nodes"),
        (Dtype::Fp16, Partial::Fp32) => ("ty_combine_fp16_fp32", "ty_combine_fp16_fp32_nodes"),
        (Dtype::Fp16, Partial::Fp8) => ("ty_combine_fp16_fp8", "ty_combine_fp16_fp8_nodes"),
        (Dtype::Fp32, Partial::Same | Partial::Fp32) => ("ty_combine_fp32", "ty_combine_fp32_nodes"),
        (Dtype::Fp32, Partial::Fp8) => ("ty_combine_fp32_fp8", "ty_combine_fp32_fp8_nodes"),
        // In the token layout weights never come late.
        (_, Partial::Same) if plain && late && args.layout != raw::TY_LAYOUT_TOKEN => (
            if arrive { "ty_combine_plain_late" } else { "ty_combine_plain_late_tagged" },
            "ty_combine_plain_late_nodes",
        ),
        (_, Partial::Same) if plain && !late && args.layout == raw::TY_LAYOUT_TOKEN => (
            if arrive { "ty_combine_plain_token" } else { "ty_combine_plain_token_tagged" },
            "ty_combine_plain_token_nodes",
        ),
        (_, Partial::Same) if plain && !late => {
            (if arrive { "ty_combine_plain" } else { "ty_combine_plain_tagged" }, "ty_combine_plain_nodes")
        }
        (_, Partial::Same) => ("ty_combine_bf16", "ty_combine_bf16_nodes"),
        (_, Partial::Fp32) => ("ty_combine_bf16_fp32", "ty_combine_bf16_fp32_nodes"),
        (_, Partial::Fp8) => ("ty_combine_bf16_fp8", "ty_combine_bf16_fp8_nodes"),
    };
    of_world(&args.context, kernel)
}

/// Whether what plain kernels of both directions take for granted holds: `PlainContext`, and a launch of both phases.
fn is_plain(context: &raw::ty_context, phases: u32) -> bool {
    phases == BOTH_PHASES
        && context.waves == 1
        && context.free_flags == 0
        && context.guarded == 0
        && context.even_experts != 0
        && context.stats == 0
        && context.rank_names == 0
}

/// What is for this world, of one node or of several.
fn of_world<T>(context: &raw::ty_context, (one_node, nodes): (T, T)) -> T {
    if context.nodes > 1 { nodes } else { one_node }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> raw::ty_context {
        raw::ty_context { waves: 1, nodes: 1, even_experts: 32, ..Default::default() }
    }

    fn dispatched(args: raw::ty_dispatch_args) -> &'static str {
        dispatch(&args).0
    }

    #[test]
    fn a_fact_that_does_not_hold_takes_the_general_kernel() {
        let plain = context();
        let spoilt = [
            raw::ty_context { waves: 2, ..plain },
            raw::ty_context { free_flags: 1, ..plain },
            raw::ty_context { guarded: 1, ..plain },
            raw::ty_context { even_experts: 0, ..plain },
            raw::ty_context { stats: 64, ..plain },
            raw::ty_context { rank_names: 64, ..plain },
        ];
        let both = |context| {
            let of_dispatch = raw::ty_dispatch_args { context, phases: BOTH_PHASES, ..Default::default() };
            let of_combine = raw::ty_combine_args { context, phases: BOTH_PHASES, ..Default::default() };
            (dispatched(of_dispatch), combine(&of_combine, Dtype::Bf16, Partial::Same))
        };
        assert_eq!(both(plain), ("ty_dispatch_plain_contiguous", "ty_combine_plain"));
        let two = raw::ty_context { nodes: 2, ..plain };
        assert_eq!(both(two), ("ty_dispatch_plain_contiguous_nodes", "ty_combine_plain_nodes"));
        for (i, context) in spoilt.into_iter().enumerate() {
            assert_eq!(both(context), ("ty_dispatch", "ty_combine_bf16"), "{i}");
        }
    }

    #[test]
    fn calls_of_other_kinds_take_the_general_kernel() {
        let plain = raw::ty_dispatch_args { context: context(), phases: BOTH_PHASES, ..Default::default() };
        let zeroed = raw::ty_output { zero_padding: 1, ..Default::default() };
        assert_eq!(dispatched(raw::ty_dispatch_args { output: zeroed, ..plain }), "ty_dispatch");
        for (layout, kernel) in
            [(raw::TY_LAYOUT_MASKED, "ty_dispatch_plain_masked"), (raw::TY_LAYOUT_TOKEN, "ty_dispatch_plain_token")]
        {
            let output = raw::ty_output { layout, ..Default::default() };
            assert_eq!(dispatched(raw::ty_dispatch_args { output, ..plain }), kernel);
        }
        for phases in [raw::TY_PHASE_SEND, raw::TY_PHASE_RECEIVE] {
            assert_eq!(dispatched(raw::ty_dispatch_args { phases, ..plain }), "ty_dispatch");
        }
        let plain = raw::ty_combine_args { context: context(), phases: BOTH_PHASES, ..Default::default() };
        for other in [
            raw::ty_combine_args { phases: raw::TY_PHASE_SEND, ..plain },
            raw::ty_combine_args { phases: raw::TY_PHASE_RECEIVE, ..plain },
            raw::ty_combine_args { out_dtype: raw::TY_FP32, ..plain },
            raw::ty_combine_args { accumulate: 1, ..plain },
        ] {
            assert_eq!(combine(&other, Dtype::Bf16, Partial::Same), "ty_combine_bf16");
        }
        for (layout, kernel) in
            [(raw::TY_LAYOUT_MASKED, "ty_combine_plain"), (raw::TY_LAYOUT_TOKEN, "ty_combine_plain_token")]
        {
            let args = raw::ty_combine_args { layout, ..plain };
            assert_eq!(combine(&args, Dtype::Bf16, Partial::Same), kernel);
        }
        assert_eq!(combine(&plain, Dtype::Fp16, Partial::Same), "ty_combine_fp16");
        assert_eq!(combine(&plain, Dtype::Bf16, Partial::Fp8), "ty_combine_bf16_fp8");
    }

    #[test]
    fn partial_rows_with_tags_have_kernels_of_their_own() {
        let mut context = context();
        context.regions.partial_tags.source_stride = 64;
        let late = raw::ty_context { weights: raw::TY_WEIGHTS_COMBINE, ..context };
        let combined = |context, layout| {
            let args = raw::ty_combine_args { context, layout, phases: BOTH_PHASES, ..Default::default() };
            combine(&args, Dtype::Bf16, Partial::Same)
        };
        assert_eq!(combined(context, raw::TY_LAYOUT_CONTIGUOUS), "ty_combine_plain_tagged");
        assert_eq!(combined(context, raw::TY_LAYOUT_TOKEN), "ty_combine_plain_token_tagged");
        assert_eq!(combined(late, raw::TY_LAYOUT_CONTIGUOUS), "ty_combine_plain_late_tagged");
        let nodes = raw::ty_context { nodes: 2, ..context };
        assert_eq!(combined(nodes, raw::TY_LAYOUT_CONTIGUOUS), "ty_combine_plain_nodes");
    }

    #[test]
    fn calls_that_quantise_or_weigh_late_have_kernels_of_their_own() {
        let quantizes = raw::ty_context { quantize: raw::TY_QUANTIZE_UE8M0, ..context() };
        let plain = raw::ty_dispatch_args { context: quantizes, phases: BOTH_PHASES, ..Default::default() };
        for (layout, kernel) in [
            (raw::TY_LAYOUT_CONTIGUOUS, "ty_dispatch_quantize_contiguous"),
            (raw::TY_LAYOUT_MASKED, "ty_dispatch_quantize_masked"),
            (raw::TY_LAYOUT_TOKEN, "ty_dispatch"),
        ] {
            let output = raw::ty_output { layout, ..Default::default() };
            assert_eq!(dispatched(raw::ty_dispatch_args { output, ..plain }), kernel);
        }
        assert_eq!(dispatched(raw::ty_dispatch_args { phases: raw::TY_PHASE_SEND, ..plain }), "ty_dispatch");
        // Combine has nothing to quantise.
        let plain = raw::ty_combine_args { context: quantizes, phases: BOTH_PHASES, ..Default::default() };
        assert_eq!(combine(&plain, Dtype::Bf16, Partial::Same), "ty_combine_plain");
        let late = raw::ty_context { weights: raw::TY_WEIGHTS_COMBINE, ..context() };
        let plain = raw::ty_combine_args { context: late, phases: BOTH_PHASES, ..Default::default() };
        for (layout, kernel) in [
            (raw::TY_LAYOUT_CONTIGUOUS, "ty_combine_plain_late"),
            (raw::TY_LAYOUT_MASKED, "ty_combine_plain_late"),
            (raw::TY_LAYOUT_TOKEN, "ty_combine_bf16"),
        ] {
            let args = raw::ty_combine_args { layout, ..plain };
            assert_eq!(combine(&args, Dtype::Bf16, Partial::Same), kernel);
        }
        let dispatch = raw::ty_dispatch_args { context: late, phases: BOTH_PHASES, ..Default::default() };
        assert_eq!(dispatched(dispatch), "ty_dispatch_plain_contiguous");
    }
}
