//! "..." in an equation of `einsum`.

/// Returns the labels of each operand and of the result, with letters that the equation does not use in the place of "...": the
/// last letter for the last dim that it stands for. Fails with the reason.
pub(super) fn spelled_out(
    operands: &[&str],
    result: &str,
    dims: &[usize],
) -> Result<(Vec<Vec<char>>, Vec<char>), String> {
    const DOTS: &str = "...";
    let covered = |(operand, dims): (&&str, &usize)| {
        match operand.matches(DOTS).count() {
        0 => Ok(0),
        1 => dims.checked_sub(operand.chars().count() - DOTS.len()).ok_or_else(|| {
            format!("\"{operand}\" names more than the {dims} dims of its tensor; expected at most one letter for each")
        }),
        _ => Err(format!("\"{operand}\" has several \"...\"; expected one")),
    }
    };
    let covered: Vec<usize> = operands.iter().zip(dims).map(covered).collect::<Result<_, _>>()?;
    let most = covered.iter().copied().max().unwrap_or(0);
    let is_free = |letter: &char| !result.contains(*letter) && operands.iter().all(|o| !o.contains(*letter));
    let letters: String = ('a'..='z').chain('A'..='Z').filter(is_free).take(most).collect();
    if letters.len() < most {
        return Err(format!("\"...\" stands for {most} dims, and {} letters are left", letters.len()));
    }
    let spelled = |(operand, count): (&&str, usize)| -> Vec<char> {
        operand.replace(DOTS, &letters[most - count..]).chars().collect()
    };
    let labels = operands.iter().zip(covered).map(spelled).collect();
    Ok((labels, result.replace(DOTS, &letters).chars().collect()))
}
