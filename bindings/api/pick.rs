//! Picks the kernel of a call.
//!
//! Kernels for one node have no code for several nodes, and specialised kernels have no code that only other calls
//! need: absent code is neither fetched nor stepped over. kernels/common/specialised.cuh lists the assumptions of
//! specialised kernels; this file checks whether a call meets them. Ranks may take different kernels in one epoch.

use super::format::Partial;
use crate::base::Dtype;
use crate::ffi::layout as raw;

/// A launch that sends and receives.
pub(super) const BOTH_PHASES: u32 = raw::TY_PHASE_SEND | raw::TY_PHASE_RECEIVE;

/// A kernel for one node, and its counterpart for several.
type Pair = (&'static str, &'static str);

/// Dispatch's kernel for a launch, and the shared memory of a block in bytes.
pub(super) fn dispatch(args: &raw::ty_dispatch_args) -> (&'static str, u32) {
    if args.context.regions.in_place_rows.source_stride != 0 {
        return ("ty_dispatch_in_place", raw::TY_DISPATCH_IN_PLACE_SHARED_BYTES);
    }
    let specialised = is_specialised(&args.context, args.phases) && args.output.zero_padding == 0;
    let quantizes = specialised && args.context.quantize != raw::TY_QUANTIZE_NONE;
    let kernel = match args.output.layout {
        raw::TY_LAYOUT_CONTIGUOUS if quantizes => {
            ("ty_dispatch_quantize_contiguous", "ty_dispatch_quantize_contiguous_nodes")
        }
        raw::TY_LAYOUT_MASKED if quantizes => ("ty_dispatch_quantize_masked", "ty_dispatch_quantize_masked_nodes"),
        _ if quantizes => ("ty_dispatch", "ty_dispatch_nodes"),
        raw::TY_LAYOUT_CONTIGUOUS if specialised => {
            ("ty_dispatch_specialised_contiguous", "ty_dispatch_specialised_contiguous_nodes")
        }
        raw::TY_LAYOUT_MASKED if specialised => {
            ("ty_dispatch_specialised_masked", "ty_dispatch_specialised_masked_nodes")
        }
        raw::TY_LAYOUT_TOKEN if specialised => ("ty_dispatch_specialised_token", "ty_dispatch_specialised_token_nodes"),
        _ => ("ty_dispatch", "ty_dispatch_nodes"),
    };
    let shared = (raw::TY_DISPATCH_SHARED_BYTES, raw::TY_DISPATCH_NODES_SHARED_BYTES);
    (of_world(&args.context, kernel), of_world(&args.context, shared))
}

/// Combine's kernel for a launch, where the experts' rows are of `dtype`.
pub(super) fn combine(args: &raw::ty_combine_args, dtype: Dtype, partial: Partial) -> &'static str {
    let specialised =
        is_specialised(&args.context, args.phases) && args.out_dtype == raw::TY_BF16 && args.accumulate == 0;
    let late = args.context.weights == raw::TY_WEIGHTS_COMBINE;
    // LL rows have no tags.
    let ll = args.context.regions.partial_tags.source_stride == 0;
    let kernel: Pair = match (dtype, partial) {
        (Dtype::Fp16, Partial::Same) => ("ty_combine_fp16", "ty_combine_fp16_nodes"),
        (Dtype::Fp16, Partial::Fp32) => ("ty_combine_fp16_fp32", "ty_combine_fp16_fp32_nodes"),
        (Dtype::Fp16, Partial::Fp8) => ("ty_combine_fp16_fp8", "ty_combine_fp16_fp8_nodes"),
        (Dtype::Fp32, Partial::Same | Partial::Fp32) => ("ty_combine_fp32", "ty_combine_fp32_nodes"),
        (Dtype::Fp32, Partial::Fp8) => ("ty_combine_fp32_fp8", "ty_combine_fp32_fp8_nodes"),
        // In the token layout weights never come with combine.
        (_, Partial::Same) if specialised && late && args.layout != raw::TY_LAYOUT_TOKEN => (
            if ll { "ty_combine_specialised_late" } else { "ty_combine_specialised_late_tagged" },
            "ty_combine_specialised_late_nodes",
        ),
        (_, Partial::Same) if specialised && !late && args.layout == raw::TY_LAYOUT_TOKEN => (
            if ll { "ty_combine_specialised_token" } else { "ty_combine_specialised_token_tagged" },
            "ty_combine_specialised_token_nodes",
        ),
        (_, Partial::Same) if specialised && !late => (
            if ll { "ty_combine_specialised" } else { "ty_combine_specialised_tagged" },
            "ty_combine_specialised_nodes",
        ),
        (_, Partial::Same) => ("ty_combine_bf16", "ty_combine_bf16_nodes"),
        (_, Partial::Fp32) => ("ty_combine_bf16_fp32", "ty_combine_bf16_fp32_nodes"),
        (_, Partial::Fp8) => ("ty_combine_bf16_fp8", "ty_combine_bf16_fp8_nodes"),
    };
    of_world(&args.context, kernel)
}

/// Whether a launch meets the assumptions of specialised kernels in both directions: `SpecialisedContext`, and both
/// phases.
fn is_specialised(context: &raw::ty_context, phases: u32) -> bool {
    phases == BOTH_PHASES
        && context.rounds == 1
        && context.free_flags == 0
        && context.guarded == 0
        && context.even_experts != 0
        && context.stats == 0
        && context.rank_names == 0
}

/// The choice for this world: one node, or several.
fn of_world<T>(context: &raw::ty_context, (one_node, nodes): (T, T)) -> T {
    if context.nodes > 1 { nodes } else { one_node }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> raw::ty_context {
        raw::ty_context { rounds: 1, nodes: 1, even_experts: 32, ..Default::default() }
    }

    fn dispatched(args: raw::ty_dispatch_args) -> &'static str {
        dispatch(&args).0
    }

    #[test]
    fn a_fact_that_does_not_hold_takes_the_general_kernel() {
        let specialised = context();
        let spoilt = [
            raw::ty_context { rounds: 2, ..specialised },
            raw::ty_context { free_flags: 1, ..specialised },
            raw::ty_context { guarded: 1, ..specialised },
            raw::ty_context { even_experts: 0, ..specialised },
            raw::ty_context { stats: 64, ..specialised },
            raw::ty_context { rank_names: 64, ..specialised },
        ];
        let both = |context| {
            let of_dispatch = raw::ty_dispatch_args { context, phases: BOTH_PHASES, ..Default::default() };
            let of_combine = raw::ty_combine_args { context, phases: BOTH_PHASES, ..Default::default() };
            (dispatched(of_dispatch), combine(&of_combine, Dtype::Bf16, Partial::Same))
        };
        assert_eq!(both(specialised), ("ty_dispatch_specialised_contiguous", "ty_combine_specialised"));
        let two = raw::ty_context { nodes: 2, ..specialised };
        assert_eq!(both(two), ("ty_dispatch_specialised_contiguous_nodes", "ty_combine_specialised_nodes"));
        for (i, context) in spoilt.into_iter().enumerate() {
            assert_eq!(both(context), ("ty_dispatch", "ty_combine_bf16"), "{i}");
        }
    }

    #[test]
    fn calls_of_other_kinds_take_the_general_kernel() {
        let specialised = raw::ty_dispatch_args { context: context(), phases: BOTH_PHASES, ..Default::default() };
        let zeroed = raw::ty_output { zero_padding: 1, ..Default::default() };
        assert_eq!(dispatched(raw::ty_dispatch_args { output: zeroed, ..specialised }), "ty_dispatch");
        for (layout, kernel) in [
            (raw::TY_LAYOUT_MASKED, "ty_dispatch_specialised_masked"),
            (raw::TY_LAYOUT_TOKEN, "ty_dispatch_specialised_token"),
        ] {
            let output = raw::ty_output { layout, ..Default::default() };
            assert_eq!(dispatched(raw::ty_dispatch_args { output, ..specialised }), kernel);
        }
        for phases in [raw::TY_PHASE_SEND, raw::TY_PHASE_RECEIVE] {
            assert_eq!(dispatched(raw::ty_dispatch_args { phases, ..specialised }), "ty_dispatch");
        }
        let specialised = raw::ty_combine_args { context: context(), phases: BOTH_PHASES, ..Default::default() };
        for other in [
            raw::ty_combine_args { phases: raw::TY_PHASE_SEND, ..specialised },
            raw::ty_combine_args { phases: raw::TY_PHASE_RECEIVE, ..specialised },
            raw::ty_combine_args { out_dtype: raw::TY_FP32, ..specialised },
            raw::ty_combine_args { accumulate: 1, ..specialised },
        ] {
            assert_eq!(combine(&other, Dtype::Bf16, Partial::Same), "ty_combine_bf16");
        }
        for (layout, kernel) in
            [(raw::TY_LAYOUT_MASKED, "ty_combine_specialised"), (raw::TY_LAYOUT_TOKEN, "ty_combine_specialised_token")]
        {
            let args = raw::ty_combine_args { layout, ..specialised };
            assert_eq!(combine(&args, Dtype::Bf16, Partial::Same), kernel);
        }
        assert_eq!(combine(&specialised, Dtype::Fp16, Partial::Same), "ty_combine_fp16");
        assert_eq!(combine(&specialised, Dtype::Bf16, Partial::Fp8), "ty_combine_bf16_fp8");
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
        assert_eq!(combined(context, raw::TY_LAYOUT_CONTIGUOUS), "ty_combine_specialised_tagged");
        assert_eq!(combined(context, raw::TY_LAYOUT_TOKEN), "ty_combine_specialised_token_tagged");
        assert_eq!(combined(late, raw::TY_LAYOUT_CONTIGUOUS), "ty_combine_specialised_late_tagged");
        let nodes = raw::ty_context { nodes: 2, ..context };
        assert_eq!(combined(nodes, raw::TY_LAYOUT_CONTIGUOUS), "ty_combine_specialised_nodes");
    }

    #[test]
    fn calls_that_quantise_or_weigh_late_have_kernels_of_their_own() {
        let quantizes = raw::ty_context { quantize: raw::TY_QUANTIZE_UE8M0, ..context() };
        let specialised = raw::ty_dispatch_args { context: quantizes, phases: BOTH_PHASES, ..Default::default() };
        for (layout, kernel) in [
            (raw::TY_LAYOUT_CONTIGUOUS, "ty_dispatch_quantize_contiguous"),
            (raw::TY_LAYOUT_MASKED, "ty_dispatch_quantize_masked"),
            (raw::TY_LAYOUT_TOKEN, "ty_dispatch"),
        ] {
            let output = raw::ty_output { layout, ..Default::default() };
            assert_eq!(dispatched(raw::ty_dispatch_args { output, ..specialised }), kernel);
        }
        assert_eq!(dispatched(raw::ty_dispatch_args { phases: raw::TY_PHASE_SEND, ..specialised }), "ty_dispatch");
        // Combine has nothing to quantise.
        let specialised = raw::ty_combine_args { context: quantizes, phases: BOTH_PHASES, ..Default::default() };
        assert_eq!(combine(&specialised, Dtype::Bf16, Partial::Same), "ty_combine_specialised");
        let late = raw::ty_context { weights: raw::TY_WEIGHTS_COMBINE, ..context() };
        let specialised = raw::ty_combine_args { context: late, phases: BOTH_PHASES, ..Default::default() };
        for (layout, kernel) in [
            (raw::TY_LAYOUT_CONTIGUOUS, "ty_combine_specialised_late"),
            (raw::TY_LAYOUT_MASKED, "ty_combine_specialised_late"),
            (raw::TY_LAYOUT_TOKEN, "ty_combine_bf16"),
        ] {
            let args = raw::ty_combine_args { layout, ..specialised };
            assert_eq!(combine(&args, Dtype::Bf16, Partial::Same), kernel);
        }
        let dispatch = raw::ty_dispatch_args { context: late, phases: BOTH_PHASES, ..Default::default() };
        assert_eq!(dispatched(dispatch), "ty_dispatch_specialised_contiguous");
    }
}
