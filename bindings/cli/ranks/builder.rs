//! The builder of a case's context, and the check that the library accepts it.
//!
//! Before the data path, on any thread; pure arithmetic of the library's plan.

use tokenyard::internals::api::FEW_BLOCKS;
use tokenyard::{
    AllToAll, AllToAllBuilder, CallFormat, Error, MissingRanks, Partial, Placement, Result, RowFormat, Scales, Weights,
    World,
};

use super::network;
use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::ScaleKind;
use crate::cli::cases::words::{DeviceWord, MissingWord, Mode, PartialWord, PlacementWord, WeightsWord};
use crate::cli::usage::Refusal;

/// Format of a case's dispatched rows.
///
/// # Errors
/// If such rows cannot have scales.
fn row_format(case: &Case) -> Result<RowFormat> {
    let scales = match case.scales {
        ScaleKind::None => Scales::None,
        ScaleKind::F32 => Scales::F32,
        ScaleKind::Ue8m0 => Scales::Ue8m0,
    };
    RowFormat::new(case.dtype, scales)
}

fn weights(case: &Case) -> Weights {
    match case.weights {
        WeightsWord::Dispatch => Weights::Dispatch,
        WeightsWord::Combine => Weights::Combine,
        WeightsWord::None => Weights::None,
    }
}

/// The format of a case's calls.
///
/// # Errors
/// As `row_format`.
pub fn call_format(case: &Case) -> Result<CallFormat> {
    let format = CallFormat::new(case.hidden, row_format(case)?, case.max_tokens).quantize(case.quantize);
    Ok(format.combine_dtype(case.combine_dtype).weights(weights(case)))
}

/// The library's view of a case.
///
/// # Errors
/// If the placement is impossible.
pub fn builder(case: &Case, world: &World) -> Result<AllToAllBuilder> {
    let partial = match case.partial {
        PartialWord::Same => Partial::Same,
        PartialWord::Fp32 => Partial::Fp32,
        PartialWord::Fp8 => Partial::Fp8,
    };
    let mut builder = AllToAll::builder(world)
        .hidden(case.hidden)
        .experts(case.placed_experts())
        .top_k(case.top_k)
        .max_tokens_per_rank(case.max_tokens)
        .format(row_format(case)?)
        .quantize(case.quantize)
        .combine_dtype(case.combine_dtype)
        .placement(placement(case)?)
        .weights(weights(case));
    if case.mixed {
        builder = builder.room_for(call_format(&case.other())?);
    }
    builder = builder.missing_ranks(match case.missing {
        MissingWord::No => MissingRanks::Fatal,
        MissingWord::Able => MissingRanks::MaskedAtDeadline,
        MissingWord::One => MissingRanks::Masked,
    });
    if let Some(sms) = case.sms {
        builder = builder.sms(sms as u32);
    }
    Ok(builder.tuning(|tuning| {
        tuning.partial = partial;
        tuning.duplicates = case.duplicate_percent.is_some();
        tuning.payload_words = case.payload_words();
        tuning.dispatch_payload_words = case.dispatch_payload;
        tuning.compact_handles = case.compact_handles.then_some(true);
        // A capture cannot enlarge handles.
        let most = case.local_counts().into_iter().max().unwrap_or(0);
        tuning.handle_rows = (case.mode == Mode::Graph).then(|| case.output_rows(most));
        tuning.in_place = case.in_place.then(|| (case.capacity(), case.align));
        tuning.first_epoch = case.first_epoch.unwrap_or(tuning.first_epoch);
    }))
}

fn placement(case: &Case) -> Result<Placement> {
    let placed = match case.placement {
        PlacementWord::Even => Placement::even(case.placed_experts(), case.world)?,
        PlacementWord::Table => Placement::table(case.expert_rank(), case.world)?,
    };
    if case.replicas == 1 {
        return Ok(placed);
    }
    placed.replicas((0..case.placed_experts()).map(|expert| (expert % case.experts) as u32).collect())
}

/// The builder of each rank, if the library accepts it.
///
/// # Errors
/// The library's refusal, naming the option.
pub fn planned(case: &Case, device: DeviceWord) -> std::result::Result<AllToAllBuilder, Refusal> {
    let refused = |error: Error| match error {
        Error::Config { name, value, advice } => {
            Refusal::of(&format!("--{}", name.trim_end_matches("_per_rank").replace('_', "-")), value, advice)
        }
        other => Refusal::from_error(&other),
    };
    let few_blocks = case.sms.map_or(device == DeviceWord::Cpu, |sms| sms <= FEW_BLOCKS as usize);
    // A builder without a device checks the CPU device's limit of blocks.
    let case = &Case { sms: case.sms.filter(|_| device == DeviceWord::Cpu), ..case.clone() };
    let first = World::threads(case.world).map_err(refused)?.remove(0);
    let world = network::place(first, case).map_err(refused)?;
    let mut builder = network::attach(builder(case, &world).map_err(refused)?, None, case);
    if few_blocks {
        builder = builder.tuning(|tuning| _ = tuning.ll_tokens.get_or_insert(0));
    }
    builder.plan().map_err(refused)?;
    Ok(builder)
}
