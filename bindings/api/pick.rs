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

/// Dispatch's kernel for a launch, and the shared memory of a block in bytes. `again`: by an earlier handle.
pub(super) fn dispatch(args: &raw::ty_dispatch_args, again: bool) -> (&'static str, u32) {
    if args.context.regions.in_place_rows.source_stride != 0 {
        return ("ty_dispatch_in_place", raw::TY_DISPATCH_IN_PLACE_SHARED_BYTES);
    }
    let shared = (raw::TY_DISPATCH_SHARED_BYTES, raw::TY_DISPATCH_NODES_SHARED_BYTES);
    if args.context.absences.ranks != 0 {
        let counts = args.first_counts != 0 && args.phases == raw::TY_PHASE_SEND;
        let kernel = match counts {
            true => ("ty_dispatch_absence_counts", "ty_dispatch_absence_counts_nodes"),
            false => ("ty_dispatch_absence", "ty_dispatch_absence_nodes"),
        };
        return (of_world(&args.context, kernel), of_world(&args.context, shared));
    }
    if args.tokens.payload_words > 0 {
        let kernel = dispatch_with_payload(args, again);
        return (of_world(&args.context, kernel), of_world(&args.context, shared));
    }
    if again {
        let usual = args.context.quantize == raw::TY_QUANTIZE_NONE && args.phases == BOTH_PHASES;
        let kernel = match is_usual(&args.context, &args.handle) && usual {
            true => ("ty_dispatch_again_specialised", "ty_dispatch_again_specialised_nodes"),
            false => ("ty_dispatch_again", "ty_dispatch_again_nodes"),
        };
        return (of_world(&args.context, kernel), of_world(&args.context, shared));
    }
    if args.first_counts != 0 && args.phases == raw::TY_PHASE_SEND {
        let usual = args.context.quantize == raw::TY_QUANTIZE_NONE && !takes_any_routing(args);
        let kernel = match is_usual(&args.context, &args.handle) && usual {
            true => ("ty_dispatch_counts_specialised", "ty_dispatch_counts_specialised_nodes"),
            false => ("ty_dispatch_counts", "ty_dispatch_counts_nodes"),
        };
        return (of_world(&args.context, kernel), of_world(&args.context, shared));
    }
    let specialised = is_specialised_dispatch(args);
    let quantizes = specialised && args.context.quantize != raw::TY_QUANTIZE_NONE;
    let any_routing = specialised && takes_any_routing(args);
    // Between nodes such calls are as those of any routing.
    let repeats = any_routing && names_experts(args) && args.context.nodes == 1 && !quantizes;
    let repeats = match args.output.layout {
        raw::TY_LAYOUT_CONTIGUOUS if repeats => Some("ty_dispatch_repeats_contiguous"),
        raw::TY_LAYOUT_MASKED if repeats => Some("ty_dispatch_repeats_masked"),
        raw::TY_LAYOUT_TOKEN if repeats => Some("ty_dispatch_repeats_token"),
        _ => None,
    };
    if let Some(kernel) = repeats {
        return (kernel, of_world(&args.context, shared));
    }
    let kernel = match args.output.layout {
        _ if quantizes && any_routing => ("ty_dispatch", "ty_dispatch_nodes"),
        raw::TY_LAYOUT_CONTIGUOUS if any_routing => {
            ("ty_dispatch_any_routing_contiguous", "ty_dispatch_any_routing_contiguous_nodes")
        }
        raw::TY_LAYOUT_MASKED if any_routing => {
            ("ty_dispatch_any_routing_masked", "ty_dispatch_any_routing_masked_nodes")
        }
        raw::TY_LAYOUT_TOKEN if any_routing => ("ty_dispatch_any_routing_token", "ty_dispatch_any_routing_token_nodes"),
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
    (of_world(&args.context, kernel), of_world(&args.context, shared))
}

/// The same of rows with a side payload.
fn dispatch_with_payload(args: &raw::ty_dispatch_args, again: bool) -> Pair {
    let counts = args.first_counts != 0 && args.phases == raw::TY_PHASE_SEND;
    let quantizes = args.context.quantize != raw::TY_QUANTIZE_NONE;
    let specialised = is_specialised_dispatch(args) && !quantizes && !takes_any_routing(args);
    match args.output.layout {
        _ if again => ("ty_dispatch_payload_again", "ty_dispatch_payload_again_nodes"),
        _ if counts => ("ty_dispatch_payload_counts", "ty_dispatch_payload_counts_nodes"),
        raw::TY_LAYOUT_CONTIGUOUS if specialised => {
            ("ty_dispatch_payload_specialised_contiguous", "ty_dispatch_payload_specialised_contiguous_nodes")
        }
        raw::TY_LAYOUT_TOKEN if specialised => {
            ("ty_dispatch_payload_specialised_token", "ty_dispatch_payload_specialised_token_nodes")
        }
        _ => ("ty_dispatch_payload", "ty_dispatch_payload_nodes"),
    }
}

/// Whether choices may be other than numbers of experts, top_k for each token, each named once.
fn takes_any_routing(args: &raw::ty_dispatch_args) -> bool {
    args.context.bitmap_bits > 1 || !names_experts(args)
}

/// Whether choices are numbers of experts, top_k for each token.
fn names_experts(args: &raw::ty_dispatch_args) -> bool {
    let (context, tokens) = (&args.context, &args.tokens);
    context.replicas == 0 && tokens.index_bytes != 1 && tokens.choices == context.top_k
}

/// Combine's kernel for a launch, where the experts' rows are of `dtype`.
pub(super) fn combine(args: &raw::ty_combine_args, dtype: Dtype, partial: Partial) -> &'static str {
    if args.context.absences.ranks != 0 {
        let kernel = match dtype {
            Dtype::Fp16 => ("ty_combine_absence_fp16", "ty_combine_absence_fp16_nodes"),
            Dtype::Fp32 => ("ty_combine_absence_fp32", "ty_combine_absence_fp32_nodes"),
            _ => ("ty_combine_absence_bf16", "ty_combine_absence_bf16_nodes"),
        };
        return of_world(&args.context, kernel);
    }
    let plain = args.out_dtype == raw::TY_BF16 && args.accumulate == 0 && args.wait_times == 0;
    let specialised = is_specialised(&args.context, &args.handle, args.phases) && plain;
    let late = args.context.weights == raw::TY_WEIGHTS_COMBINE;
    // LL rows have no tags.
    let ll = args.context.regions.partial_tags.source_stride == 0;
    if args.payload_words > 0 {
        // Partial rows with a payload are of the combine dtype.
        let kernel = match dtype {
            Dtype::Fp16 => ("ty_combine_payload_fp16", "ty_combine_payload_fp16_nodes"),
            Dtype::Fp32 => ("ty_combine_payload_fp32", "ty_combine_payload_fp32_nodes"),
            _ if !specialised || late => ("ty_combine_payload_bf16", "ty_combine_payload_bf16_nodes"),
            _ if args.layout == raw::TY_LAYOUT_TOKEN => (
                if ll { "ty_combine_payload_specialised_token" } else { "ty_combine_payload_specialised_token_tagged" },
                "ty_combine_payload_specialised_token_nodes",
            ),
            _ => (
                if ll { "ty_combine_payload_specialised" } else { "ty_combine_payload_specialised_tagged" },
                "ty_combine_payload_specialised_nodes",
            ),
        };
        return of_world(&args.context, kernel);
    }
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

/// A barrier's kernel.
pub(super) fn barrier(args: &raw::ty_barrier_args) -> &'static str {
    if args.context.absences.ranks == 0 {
        return "ty_barrier";
    }
    of_world(&args.context, ("ty_barrier_absence", "ty_barrier_absence_nodes"))
}

/// Whether a dispatch meets the assumptions of specialised kernels, whatever it quantises and however it is routed.
fn is_specialised_dispatch(args: &raw::ty_dispatch_args) -> bool {
    let output = &args.output;
    let plain = output.zero_padding == 0 && output.wait_times == 0 && output.drop_overflow == 0;
    is_specialised(&args.context, &args.handle, args.phases) && plain
}

/// Whether a launch meets the assumptions of specialised kernels in both directions: `is_usual`, and both phases.
fn is_specialised(context: &raw::ty_context, handle: &raw::ty_handle, phases: u32) -> bool {
    phases == BOTH_PHASES && is_usual(context, handle)
}

/// Whether context and handle are what specialised kernels assume: `SpecialisedContext`, `SpecialisedHandle`.
fn is_usual(context: &raw::ty_context, handle: &raw::ty_handle) -> bool {
    (handle.row_choices == 0 || context.nodes > 1)
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
        raw::ty_context { rounds: 1, nodes: 1, even_experts: 32, bitmap_bits: 1, ..Default::default() }
    }

    fn dispatched(args: raw::ty_dispatch_args) -> &'static str {
        dispatch(&args, false).0
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
    fn compact_handles_of_one_node_take_general_kernels() {
        for (nodes, kernels) in [
            (1, ("ty_dispatch", "ty_combine_bf16")),
            (2, ("ty_dispatch_specialised_contiguous_nodes", "ty_combine_specialised_nodes")),
        ] {
            let context = raw::ty_context { nodes, ..context() };
            let handle = raw::ty_handle { row_choices: 256, ..Default::default() };
            let of_dispatch = raw::ty_dispatch_args { context, handle, phases: BOTH_PHASES, ..Default::default() };
            let of_combine = raw::ty_combine_args { context, handle, phases: BOTH_PHASES, ..Default::default() };
            assert_eq!((dispatched(of_dispatch), combine(&of_combine, Dtype::Bf16, Partial::Same)), kernels);
        }
    }

    /// Combine sees experts alone, whatever choices were.
    #[test]
    fn any_routing_has_kernels_of_its_own() {
        let args = raw::ty_dispatch_args {
            context: raw::ty_context { top_k: 8, ..context() },
            tokens: raw::ty_tokens { index_bytes: 4, choices: 8, ..Default::default() },
            phases: BOTH_PHASES,
            ..Default::default()
        };
        let kinds = [
            raw::ty_dispatch_args { context: raw::ty_context { bitmap_bits: 4, ..args.context }, ..args },
            raw::ty_dispatch_args { context: raw::ty_context { replicas: 64, ..args.context }, ..args },
            raw::ty_dispatch_args { tokens: raw::ty_tokens { index_bytes: 1, ..args.tokens }, ..args },
            raw::ty_dispatch_args { tokens: raw::ty_tokens { choices: 7, ..args.tokens }, ..args },
        ];
        for args in kinds {
            for (layout, named) in [
                (raw::TY_LAYOUT_CONTIGUOUS, "contiguous"),
                (raw::TY_LAYOUT_MASKED, "masked"),
                (raw::TY_LAYOUT_TOKEN, "token"),
            ] {
                let output = raw::ty_output { layout, ..Default::default() };
                for (nodes, over) in [(1, ""), (2, "_nodes")] {
                    let context = raw::ty_context { nodes, ..args.context };
                    let of = |context| dispatched(raw::ty_dispatch_args { context, output, ..args });
                    let kind = if args.context.bitmap_bits > 1 && nodes == 1 { "repeats" } else { "any_routing" };
                    assert_eq!(of(context), format!("ty_dispatch_{kind}_{named}{over}"));
                    if args.context.bitmap_bits > 1 {
                        let tokens = raw::ty_tokens { choices: 7, ..args.tokens };
                        let fewer = dispatched(raw::ty_dispatch_args { context, output, tokens, ..args });
                        assert_eq!(fewer, format!("ty_dispatch_any_routing_{named}{over}"));
                    }
                    let quantize = raw::TY_QUANTIZE_F32;
                    assert_eq!(of(raw::ty_context { quantize, ..context }), format!("ty_dispatch{over}"));
                    assert_eq!(of(raw::ty_context { rounds: 2, ..context }), format!("ty_dispatch{over}"));
                }
            }
            let combine = raw::ty_combine_args { context: args.context, phases: BOTH_PHASES, ..Default::default() };
            assert_eq!(super::combine(&combine, Dtype::Bf16, Partial::Same), "ty_combine_specialised");
        }
        assert_eq!(dispatched(args), "ty_dispatch_specialised_contiguous");
    }

    #[test]
    fn calls_of_other_kinds_take_the_general_kernel() {
        let specialised = raw::ty_dispatch_args { context: context(), phases: BOTH_PHASES, ..Default::default() };
        let zeroed = raw::ty_output { zero_padding: 1, ..Default::default() };
        assert_eq!(dispatched(raw::ty_dispatch_args { output: zeroed, ..specialised }), "ty_dispatch");
        let timed = raw::ty_output { wait_times: 64, ..Default::default() };
        assert_eq!(dispatched(raw::ty_dispatch_args { output: timed, ..specialised }), "ty_dispatch");
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
            raw::ty_combine_args { wait_times: 64, ..specialised },
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

    /// Every call of a kind has a name made of its parts, in the order in which the kernels have them.
    #[test]
    fn every_dispatch_takes_the_kernel_that_is_named_after_it() {
        let layouts = [
            (raw::TY_LAYOUT_CONTIGUOUS, "contiguous"),
            (raw::TY_LAYOUT_MASKED, "masked"),
            (raw::TY_LAYOUT_TOKEN, "token"),
        ];
        let quantises = [raw::TY_QUANTIZE_NONE, raw::TY_QUANTIZE_F32, raw::TY_QUANTIZE_UE8M0];
        for (layout, named) in layouts {
            for (quantize, nodes, phases, zero_padding) in quantises
                .into_iter()
                .flat_map(|quantize| [1, 2, 64].map(|nodes| (quantize, nodes)))
                .flat_map(|(quantize, nodes)| [1, 2, 3].map(|phases| (quantize, nodes, phases)))
                .flat_map(|(quantize, nodes, phases)| [0, 1].map(|zero| (quantize, nodes, phases, zero)))
            {
                let context = raw::ty_context { nodes, quantize, ..context() };
                let output = raw::ty_output { layout, zero_padding, ..Default::default() };
                let args = raw::ty_dispatch_args { context, output, phases, ..Default::default() };
                let usual = phases == 3 && zero_padding == 0;
                let kind = match (usual, quantize != raw::TY_QUANTIZE_NONE, named) {
                    // Few callers want quantised rows token by token.
                    (false, ..) | (true, true, "token") => String::new(),
                    (true, true, layout) => format!("_quantize_{layout}"),
                    (true, false, layout) => format!("_specialised_{layout}"),
                };
                let (over, shared) = match nodes {
                    1 => ("", raw::TY_DISPATCH_SHARED_BYTES),
                    _ => ("_nodes", raw::TY_DISPATCH_NODES_SHARED_BYTES),
                };
                let (kernel, bytes) = dispatch(&args, false);
                let drops = raw::ty_output { drop_overflow: 1, ..output };
                let dropping = raw::ty_dispatch_args { output: drops, ..args };
                assert_eq!(dispatch(&dropping, false), (format!("ty_dispatch{over}").as_str(), shared));
                let what = format!("{named}, {quantize}, {nodes} nodes, phases {phases}, {zero_padding}");
                assert_eq!((kernel, bytes), (format!("ty_dispatch{kind}{over}").as_str(), shared), "{what}");
            }
        }
    }

    #[test]
    fn counts_come_first_by_kernels_of_their_own() {
        for (nodes, over, shared) in
            [(1, "", raw::TY_DISPATCH_SHARED_BYTES), (2, "_nodes", raw::TY_DISPATCH_NODES_SHARED_BYTES)]
        {
            let context = raw::ty_context { nodes, ..context() };
            let args = raw::ty_dispatch_args { context, first_counts: 64, ..Default::default() };
            let usual = raw::ty_dispatch_args { phases: raw::TY_PHASE_SEND, ..args };
            let specialised = format!("ty_dispatch_counts_specialised{over}");
            assert_eq!(dispatch(&usual, false), (specialised.as_str(), shared));
            for other in [
                raw::ty_dispatch_args { context: raw::ty_context { rounds: 2, ..context }, ..usual },
                raw::ty_dispatch_args { context: raw::ty_context { replicas: 64, ..context }, ..usual },
                raw::ty_dispatch_args {
                    context: raw::ty_context { quantize: raw::TY_QUANTIZE_F32, ..context },
                    ..usual
                },
            ] {
                assert_eq!(dispatch(&other, false), (format!("ty_dispatch_counts{over}").as_str(), shared));
            }
            let receives = dispatched(raw::ty_dispatch_args { phases: raw::TY_PHASE_RECEIVE, ..args });
            assert_eq!(receives, if nodes == 1 { "ty_dispatch" } else { "ty_dispatch_nodes" });
        }
    }

    #[test]
    fn dispatches_by_earlier_handles_have_kernels_of_their_own() {
        for (nodes, over) in [(1, ""), (2, "_nodes")] {
            let usual = raw::ty_dispatch_args {
                context: raw::ty_context { nodes, ..context() },
                phases: BOTH_PHASES,
                ..Default::default()
            };
            let quantizes = raw::ty_context { quantize: raw::TY_QUANTIZE_F32, ..usual.context };
            let rounds = raw::ty_context { rounds: 2, ..usual.context };
            assert_eq!(dispatch(&usual, true).0, format!("ty_dispatch_again_specialised{over}"));
            for other in [
                raw::ty_dispatch_args { phases: raw::TY_PHASE_SEND, ..usual },
                raw::ty_dispatch_args { phases: raw::TY_PHASE_RECEIVE, ..usual },
                raw::ty_dispatch_args { context: quantizes, ..usual },
                raw::ty_dispatch_args { context: rounds, ..usual },
            ] {
                assert_eq!(dispatch(&other, true).0, format!("ty_dispatch_again{over}"));
            }
        }
    }

    #[test]
    fn dispatches_with_a_payload_have_kernels_of_their_own() {
        for (nodes, over) in [(1, ""), (2, "_nodes")] {
            let context = raw::ty_context { nodes, ..context() };
            let tokens = raw::ty_tokens { payload_words: 1, ..Default::default() };
            let usual = raw::ty_dispatch_args { context, tokens, phases: BOTH_PHASES, ..Default::default() };
            let of = |args: &raw::ty_dispatch_args| dispatch(args, false).0.to_owned();
            assert_eq!(of(&usual), format!("ty_dispatch_payload_specialised_contiguous{over}"));
            let laid = |layout| raw::ty_output { layout, ..Default::default() };
            let token = raw::ty_dispatch_args { output: laid(raw::TY_LAYOUT_TOKEN), ..usual };
            assert_eq!(of(&token), format!("ty_dispatch_payload_specialised_token{over}"));
            let zeroed = raw::ty_output { zero_padding: 1, ..Default::default() };
            let drops = raw::ty_output { drop_overflow: 1, ..Default::default() };
            let quantizes = raw::ty_context { quantize: raw::TY_QUANTIZE_F32, ..context };
            for other in [
                raw::ty_dispatch_args { output: laid(raw::TY_LAYOUT_MASKED), ..usual },
                raw::ty_dispatch_args { output: zeroed, ..usual },
                raw::ty_dispatch_args { output: drops, ..usual },
                raw::ty_dispatch_args { phases: raw::TY_PHASE_SEND, ..usual },
                raw::ty_dispatch_args { phases: raw::TY_PHASE_RECEIVE, first_counts: 64, ..token },
                raw::ty_dispatch_args { context: quantizes, ..usual },
                raw::ty_dispatch_args { context: raw::ty_context { replicas: 64, ..context }, ..usual },
            ] {
                assert_eq!(of(&other), format!("ty_dispatch_payload{over}"));
            }
            let counts = raw::ty_dispatch_args { phases: raw::TY_PHASE_SEND, first_counts: 64, ..usual };
            assert_eq!(of(&counts), format!("ty_dispatch_payload_counts{over}"));
            assert_eq!(dispatch(&usual, true).0, format!("ty_dispatch_payload_again{over}"));
        }
    }

    #[test]
    fn combines_with_a_payload_have_kernels_of_their_own() {
        for (nodes, tags, way, over) in [(1, 0, "", ""), (1, 64, "_tagged", ""), (2, 64, "_nodes", "_nodes")] {
            let mut context = raw::ty_context { nodes, ..context() };
            context.regions.partial_tags.source_stride = tags;
            let usual = raw::ty_combine_args { context, payload_words: 1, phases: BOTH_PHASES, ..Default::default() };
            let of = |args: &raw::ty_combine_args, dtype| combine(args, dtype, Partial::Same);
            assert_eq!(of(&usual, Dtype::Bf16), format!("ty_combine_payload_specialised{way}"));
            let token = raw::ty_combine_args { layout: raw::TY_LAYOUT_TOKEN, ..usual };
            assert_eq!(of(&token, Dtype::Bf16), format!("ty_combine_payload_specialised_token{way}"));
            let late = raw::ty_context { weights: raw::TY_WEIGHTS_COMBINE, ..context };
            for args in [
                raw::ty_combine_args { phases: raw::TY_PHASE_SEND, ..usual },
                raw::ty_combine_args { accumulate: 1, ..token },
                raw::ty_combine_args { context: late, ..usual },
            ] {
                assert_eq!(of(&args, Dtype::Bf16), format!("ty_combine_payload_bf16{over}"));
            }
            assert_eq!(of(&usual, Dtype::Fp16), format!("ty_combine_payload_fp16{over}"));
            assert_eq!(of(&usual, Dtype::Fp32), format!("ty_combine_payload_fp32{over}"));
        }
    }

    #[test]
    fn in_place_output_has_one_kernel_for_every_layout_of_a_call() {
        let mut context = context();
        context.regions.in_place_rows.source_stride = 128;
        for (phases, guarded) in [(BOTH_PHASES, 0), (BOTH_PHASES, 1), (raw::TY_PHASE_SEND, 0)] {
            let context = raw::ty_context { guarded, ..context };
            let args = raw::ty_dispatch_args { context, phases, ..Default::default() };
            assert_eq!(dispatch(&args, false), ("ty_dispatch_in_place", raw::TY_DISPATCH_IN_PLACE_SHARED_BYTES));
        }
    }

    #[test]
    fn every_combine_takes_the_kernel_that_is_named_after_it() {
        let dtypes = [(Dtype::Bf16, "bf16"), (Dtype::Fp16, "fp16"), (Dtype::Fp32, "fp32")];
        let partials = [(Partial::Same, ""), (Partial::Fp32, "_fp32"), (Partial::Fp8, "_fp8")];
        let layouts = [raw::TY_LAYOUT_CONTIGUOUS, raw::TY_LAYOUT_MASKED, raw::TY_LAYOUT_TOKEN];
        let weights = [raw::TY_WEIGHTS_DISPATCH, raw::TY_WEIGHTS_COMBINE, raw::TY_WEIGHTS_NONE];
        let calls = layouts.into_iter().flat_map(|layout| weights.map(|weights| (layout, weights)));
        let calls = calls.flat_map(|(layout, weights)| [1, 2].map(|nodes| (layout, weights, nodes)));
        let calls: Vec<_> = calls.flat_map(|(l, w, nodes)| [0, 64].map(|tags: u64| (l, w, nodes, tags))).collect();
        for ((dtype, named), (partial, over)) in dtypes.into_iter().flat_map(|dtype| partials.map(|over| (dtype, over)))
        {
            for &(layout, weights, nodes, tags) in &calls {
                let mut context = raw::ty_context { nodes, weights, ..context() };
                context.regions.partial_tags.source_stride = tags;
                let across = if nodes == 1 { "" } else { "_nodes" };
                let late = weights == raw::TY_WEIGHTS_COMBINE;
                // Sums of fp32 rows are as they are in fp32.
                let general = match (dtype, partial) {
                    (Dtype::Fp32, Partial::Fp32) => "ty_combine_fp32".to_string() + across,
                    _ => format!("ty_combine_{named}{over}{across}"),
                };
                // Specialised kernels have bf16 rows as they are, and tags of their own in one node.
                let kind = match (late, layout == raw::TY_LAYOUT_TOKEN) {
                    (true, true) => None,
                    (true, false) => Some("_late"),
                    (false, true) => Some("_token"),
                    (false, false) => Some(""),
                };
                let tagged = if tags > 0 && nodes == 1 { "_tagged" } else { "" };
                let specialised = kind.filter(|_| dtype == Dtype::Bf16 && partial == Partial::Same);
                let of_usual = specialised
                    .map_or_else(|| general.clone(), |kind| format!("ty_combine_specialised{kind}{tagged}{across}"));
                for (phases, out_dtype, accumulate, wanted) in [
                    (BOTH_PHASES, raw::TY_BF16, 0, &of_usual),
                    (BOTH_PHASES, raw::TY_FP32, 0, &general),
                    (BOTH_PHASES, raw::TY_FP16, 0, &general),
                    (BOTH_PHASES, raw::TY_BF16, 1, &general),
                    (raw::TY_PHASE_SEND, raw::TY_BF16, 0, &general),
                    (raw::TY_PHASE_RECEIVE, raw::TY_BF16, 0, &general),
                ] {
                    let args =
                        raw::ty_combine_args { context, layout, phases, out_dtype, accumulate, ..Default::default() };
                    let what = format!("{named}{over}, layout {layout}, weights {weights}, {nodes} nodes, tags {tags}");
                    assert_eq!(combine(&args, dtype, partial), wanted.as_str(), "{what}, phases {phases}");
                }
            }
        }
    }
}
