//! Calendars of time axes, as the CF conventions define them, in exact integer arithmetic.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Microseconds of a day.
const DAY: i64 = 86_400_000_000;
/// Days before each month of a year without a leap day.
const BEFORE: [i64; 13] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365];
/// Largest year, and smallest if negative, that a date may have.
const MOST_YEARS: i64 = 99_999;

/// The unit of a time axis as its file stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeUnit {
    /// Unit, such as `hours since 1900-01-01`.
    pub unit: String,
    /// Name of the calendar; CF's `standard` if there is none.
    pub calendar: Option<String>,
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calendar = self.calendar.as_deref().unwrap_or("standard");
        write!(f, "\"{}\" of the calendar {calendar}", self.unit)
    }
}

/// A time in a configuration: a number in the unit of the file, or a date.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TimePoint {
    /// In the unit of the file.
    Number(f64),
    /// A date of the file's calendar: `1980`, `1980-02`, `1980-02-28` or `1980-02-28T18:00`.
    Date(String),
}

impl fmt::Display for TimePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Date(date) => write!(f, "{date:?}"),
        }
    }
}

/// Rule by which days are counted. Names are CF's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calendar {
    /// `standard`, `gregorian`: Gregorian from 1582-10-15 on, Julian before.
    Standard,
    /// `proleptic_gregorian`: Gregorian at all times.
    ProlepticGregorian,
    /// `julian`: each fourth year is a leap year.
    Julian,
    /// `noleap`, `365_day`: no leap years.
    NoLeap,
    /// `all_leap`, `366_day`: each year has a leap day.
    AllLeap,
    /// `360_day`: each month has 30 days.
    Days360,
}

/// A date and the time of the day.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Date {
    /// Year; 0 precedes 1.
    pub year: i64,
    /// Month, 1 to 12.
    pub month: u32,
    /// Day of the month, from 1.
    pub day: u32,
    /// Days since the start of the year, with the fraction of the day.
    pub day_of_year: f64,
    /// Number of days of the year.
    pub year_days: f64,
    /// Fraction of the day, 0 to 1.
    pub fraction: f64,
}

/// A time axis with a calendar: turns the numbers of a file into dates.
///
/// ```
/// use isobar_data::{TimeAxis, TimeUnit};
///
/// let unit = TimeUnit { unit: "hours since 1900-01-01".into(), calendar: Some("noleap".into()) };
/// let date = TimeAxis::new(&unit)?.date(59.0 * 24.0 + 6.0);
/// assert_eq!((date.year, date.month, date.day, date.fraction), (1900, 3, 1, 0.25));
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeAxis {
    calendar: Calendar,
    /// Microseconds of a unit.
    unit: i64,
    /// Microseconds from the start of year 0 to time 0.
    origin: i64,
}

impl TimeAxis {
    /// Reads `UNIT since DATE` and the name of the calendar.
    ///
    /// # Errors
    /// A unit without a reference date or of no fixed length (months, years), a date that the calendar does not have, and
    /// an unknown calendar.
    pub fn new(unit: &TimeUnit) -> Result<Self> {
        let calendar = Calendar::named(unit.calendar.as_deref().unwrap_or("standard"))?;
        let wrong = || {
            Error::Config(format!(
                "the unit of time is {:?}, expected one like \"hours since 1900-01-01\": seconds, minutes, hours, days or \
                 weeks since a date",
                unit.unit
            ))
        };
        let mut words = unit.unit.split_whitespace();
        let step = words.next().and_then(length).ok_or_else(wrong)?;
        if !words.next().is_some_and(|word| word.eq_ignore_ascii_case("since")) {
            return Err(wrong());
        }
        let rest: Vec<&str> = words.collect();
        let start = calendar.period(&rest.join(" "))?.0;
        Ok(Self { calendar, unit: step, origin: start })
    }

    /// The calendar.
    pub fn calendar(&self) -> Calendar {
        self.calendar
    }

    /// Microseconds from the start of year 0 of the calendar to a time of the axis, rounded.
    pub fn instant(&self, time: f64) -> i64 {
        // Whole units are exact; only the fraction is rounded.
        let whole = (time.trunc() as i64).saturating_mul(self.unit);
        let part = (time.fract() * self.unit as f64).round() as i64;
        self.origin.saturating_add(whole).saturating_add(part)
    }

    /// The time of the axis at an instant, in its unit.
    pub fn time(&self, instant: i64) -> f64 {
        let since = instant.saturating_sub(self.origin);
        (since.div_euclid(self.unit)) as f64 + since.rem_euclid(self.unit) as f64 / self.unit as f64
    }

    /// The time of another axis with the same date; `None` if the axes have different calendars. Since 1582-10-15, `standard` and
    /// `proleptic_gregorian` have the same dates.
    ///
    /// ```
    /// use isobar_data::{TimeAxis, TimeUnit};
    ///
    /// let axis = |unit: &str, calendar: &str| {
    ///     TimeAxis::new(&TimeUnit { unit: unit.into(), calendar: Some(calendar.into()) })
    /// };
    /// let (days, hours) = (axis("days since 2000-01-01", "standard")?, axis("hours since 2000-01-02", "proleptic_gregorian")?);
    /// assert_eq!(days.convert(2.5, &hours), Some(36.0));
    /// assert_eq!(days.convert(2.5, &axis("days since 2000-01-01", "noleap")?), None);
    /// # Ok::<(), isobar_data::Error>(())
    /// ```
    pub fn convert(&self, time: f64, to: &Self) -> Option<f64> {
        let instant = self.instant(time);
        // Days that the Julian year 0 of `standard` starts before the Gregorian one.
        let days = match (self.calendar, to.calendar) {
            (from, other) if from == other => return Some(to.time(instant)),
            (Calendar::Standard, Calendar::ProlepticGregorian) => -2,
            (Calendar::ProlepticGregorian, Calendar::Standard) => 2,
            _ => return None,
        };
        let first = self.calendar.days(1582, 10, 15)?.saturating_mul(DAY);
        (instant >= first).then(|| to.time(instant.saturating_add(days * DAY)))
    }

    /// The date of a time of the axis.
    pub fn date(&self, time: f64) -> Date {
        let instant = self.instant(time);
        let (days, fraction) = (instant.div_euclid(DAY), instant.rem_euclid(DAY) as f64 / DAY as f64);
        let (year, month, day) = self.calendar.date(days);
        let first = self.calendar.first_day(year);
        let year_days = (self.calendar.first_day(year + 1) - first) as f64;
        Date { year, month, day, day_of_year: (days - first) as f64 + fraction, year_days, fraction }
    }

    /// The text of a time for messages, such as `1979-12-31 18:00:00`.
    pub fn text(&self, time: f64) -> String {
        let instant = self.instant(time);
        let (year, month, day) = self.calendar.date(instant.div_euclid(DAY));
        let seconds = instant.rem_euclid(DAY) / 1_000_000;
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        format!("{year:04}-{month:02}-{day:02} {hours:02}:{minutes:02}:{:02}", seconds % 60)
    }

    /// First instant of a date such as `1980`, `1980-02`, `1980-02-29` or `1980-02-29T18:00`, and the first one after it: a day
    /// for a date, a minute for a time with minutes.
    ///
    /// # Errors
    /// A text that is no date, or a date that the calendar does not have.
    pub fn period(&self, text: &str) -> Result<(i64, i64)> {
        self.calendar.period(text)
    }
}

impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Standard => "standard",
            Self::ProlepticGregorian => "proleptic_gregorian",
            Self::Julian => "julian",
            Self::NoLeap => "noleap",
            Self::AllLeap => "all_leap",
            Self::Days360 => "360_day",
        })
    }
}

impl Calendar {
    /// Finds a calendar by CF's name.
    ///
    /// # Errors
    /// Another name.
    pub fn named(name: &str) -> Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "standard" | "gregorian" | "" => Ok(Self::Standard),
            "proleptic_gregorian" => Ok(Self::ProlepticGregorian),
            "julian" => Ok(Self::Julian),
            "noleap" | "365_day" => Ok(Self::NoLeap),
            "all_leap" | "366_day" => Ok(Self::AllLeap),
            "360_day" => Ok(Self::Days360),
            _ => Err(Error::Config(format!(
                "the calendar of times is {name:?}, expected standard, gregorian, proleptic_gregorian, julian, noleap, 365_day, \
                 all_leap, 366_day or 360_day"
            ))),
        }
    }

    fn is_leap(self, year: i64) -> bool {
        let gregorian = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        match self {
            Self::NoLeap | Self::Days360 => false,
            Self::AllLeap => true,
            Self::Julian => year % 4 == 0,
            Self::ProlepticGregorian => gregorian,
            Self::Standard if year <= 1582 => year % 4 == 0,
            Self::Standard => gregorian,
        }
    }

    /// Days before a month of a year; months of `standard` are counted without the ten days that October 1582 lacks.
    fn before(self, year: i64, month: usize) -> i64 {
        match self {
            Self::Days360 => 30 * month as i64,
            _ => BEFORE[month.min(12)] + i64::from(month >= 2 && self.is_leap(year)),
        }
    }

    /// Days from the start of year 0 to the start of a year.
    fn first_day(self, year: i64) -> i64 {
        let julian = 365 * year + (year + 3).div_euclid(4);
        let gregorian = julian - (year + 99).div_euclid(100) + (year + 399).div_euclid(400);
        match self {
            Self::Days360 => 360 * year,
            Self::NoLeap => 365 * year,
            Self::AllLeap => 366 * year,
            Self::Julian => julian,
            Self::ProlepticGregorian => gregorian,
            Self::Standard if year <= 1582 => julian,
            // Year 0 is that of the Julian calendar, two days before the Gregorian one.
            Self::Standard => gregorian + 2,
        }
    }

    /// Days from the start of year 0 to a date; `None` if the calendar does not have it.
    fn days(self, year: i64, month: i64, day: i64) -> Option<i64> {
        if year.abs() > MOST_YEARS || !(1..=12).contains(&month) {
            return None;
        }
        let before = self.before(year, month as usize - 1);
        let length = self.before(year, month as usize) - before;
        if !(1..=length).contains(&day) {
            return None;
        }
        let days = self.first_day(year) + before + day - 1;
        if self != Self::Standard || (year, month) < (1582, 10) || year > 1582 {
            return Some(days);
        }
        match (month, day) {
            (10, 5..=14) => None,
            (10, ..=4) => Some(days),
            _ => Some(days - 10),
        }
    }

    /// The date of a number of days from the start of year 0.
    fn date(self, days: i64) -> (i64, u32, u32) {
        let mean = match self {
            Self::Days360 => 360.0,
            Self::NoLeap => 365.0,
            Self::AllLeap => 366.0,
            Self::Julian => 365.25,
            Self::Standard | Self::ProlepticGregorian => 365.2425,
        };
        let mut year = (days as f64 / mean).floor() as i64;
        while self.first_day(year) > days {
            year -= 1;
        }
        while self.first_day(year + 1) <= days {
            year += 1;
        }
        let mut left = days - self.first_day(year);
        if self == Self::Standard && year == 1582 && left >= self.before(year, 9) + 4 {
            left += 10;
        }
        let month = (0..12).rev().find(|&month| self.before(year, month) <= left).unwrap_or(0);
        (year, month as u32 + 1, (left - self.before(year, month) + 1) as u32)
    }

    /// First instant of a date and time of any precision, and the first one after it.
    fn period(self, text: &str) -> Result<(i64, i64)> {
        self.parse(text.trim()).ok_or_else(|| {
            Error::Config(format!(
                "{text:?} is no date of the calendar {self}: expected one like \"1980-01-31\" or \"1980-01-31T18:00\""
            ))
        })
    }

    fn parse(self, text: &str) -> Option<(i64, i64)> {
        let (date, clock) = match text.split_once(['T', 't', ' ']) {
            Some((date, clock)) => (date, Some(clock.trim())),
            None => (text.trim_end_matches(['Z', 'z']), None),
        };
        let (sign, digits) = date.strip_prefix('-').map_or((1, date), |rest| (-1, rest));
        let mut parts = digits.split('-').map(number);
        let year = sign * parts.next()??;
        let (month, day) = (parts.next(), parts.next());
        if parts.next().is_some() {
            return None;
        }
        let first = self.days(year, month.unwrap_or(Some(1))?, day.unwrap_or(Some(1))?)?;
        if let Some(clock) = clock {
            day?;
            let (start, length) = time_of_day(clock)?;
            let start = first * DAY + start;
            return Some((start, start + length));
        }
        let next = match (month.flatten(), day) {
            (_, Some(_)) => first + 1,
            (Some(12) | None, None) => self.days(year + 1, 1, 1)?,
            (Some(month), None) => self.days(year, month + 1, 1)?,
        };
        Some((first * DAY, next * DAY))
    }
}

/// Microseconds of a unit of fixed length.
fn length(unit: &str) -> Option<i64> {
    let unit = unit.to_ascii_lowercase();
    Some(match unit.as_str() {
        "microsecond" | "microseconds" | "microsec" | "microsecs" => 1,
        "millisecond" | "milliseconds" | "millisec" | "millisecs" | "msec" | "msecs" | "ms" => 1_000,
        "second" | "seconds" | "sec" | "secs" | "s" => 1_000_000,
        "minute" | "minutes" | "min" | "mins" => 60_000_000,
        "hour" | "hours" | "hr" | "hrs" | "h" => 3_600_000_000,
        "day" | "days" | "d" => DAY,
        "week" | "weeks" => 7 * DAY,
        _ => return None,
    })
}

fn number(digits: &str) -> Option<i64> {
    let all = !digits.is_empty() && digits.len() <= 6 && digits.bytes().all(|byte| byte.is_ascii_digit());
    all.then(|| digits.parse().ok()).flatten()
}

/// Start of a time of the day, and its length: an hour, a minute or a second; less the offset of a time zone.
fn time_of_day(text: &str) -> Option<(i64, i64)> {
    let text = text.trim_end_matches(['Z', 'z']).trim_end_matches("UTC").trim_end_matches("GMT").trim();
    let (clock, zone) = match text.rfind(['+', '-', ' ']) {
        Some(at) => (text[..at].trim(), zone(text[at..].trim())?),
        None => (text, 0),
    };
    let mut parts = clock.split(':');
    let hours = number(parts.next()?).filter(|hours| *hours < 24)?;
    let minutes = parts.next().map(|text| number(text).filter(|minutes| *minutes < 60));
    let seconds = parts.next().map(|text| text.parse::<f64>().ok().filter(|s| (0.0..60.0).contains(s)));
    if parts.next().is_some() {
        return None;
    }
    let (length, minutes, seconds) = match (minutes, seconds) {
        (None, _) => (3_600_000_000, 0, 0.0),
        (Some(minutes), None) => (60_000_000, minutes?, 0.0),
        (Some(minutes), Some(seconds)) => (1_000_000, minutes?, seconds?),
    };
    let start = (hours * 60 + minutes - zone) * 60_000_000 + (seconds * 1e6).round() as i64;
    Some((start, length))
}

/// Minutes by which a time zone, such as `+01:00` or `-6`, is ahead.
fn zone(text: &str) -> Option<i64> {
    let (sign, digits) = match text.split_at_checked(1)? {
        ("-", rest) => (-1, rest),
        ("+", rest) => (1, rest),
        _ => (1, text),
    };
    let (hours, minutes) = match digits.split_once(':') {
        Some((hours, minutes)) => (number(hours)?, number(minutes)?),
        None if digits.len() == 4 => (number(digits.get(..2)?)?, number(digits.get(2..)?)?),
        None => (number(digits)?, 0),
    };
    (hours < 24 && minutes < 60).then_some(sign * (60 * hours + minutes))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn axis(unit: &str, calendar: &str) -> TimeAxis {
        TimeAxis::new(&TimeUnit { unit: unit.to_owned(), calendar: Some(calendar.to_owned()) }).unwrap()
    }

    // As cftime 1.6 gives them, except for time zones, which CF subtracts.
    #[rstest]
    #[case("hours since 1900-01-01", "standard", 1_000_000.0, "2014-01-29 16:00:00")]
    #[case("days since 1970-01-01", "gregorian", -143_493.0, "1577-02-07 00:00:00")]
    #[case("days since 1582-10-04", "standard", 1.0, "1582-10-15 00:00:00")]
    #[case("days since 1582-10-16", "standard", -2.0, "1582-10-04 00:00:00")]
    #[case("days since 1582-10-04", "proleptic_gregorian", 1.0, "1582-10-05 00:00:00")]
    #[case("days since 1900-02-28", "proleptic_gregorian", 1.0, "1900-03-01 00:00:00")]
    #[case("days since 1900-02-28", "julian", 1.0, "1900-02-29 00:00:00")]
    #[case("days since 2000-02-28", "standard", 1.5, "2000-02-29 12:00:00")]
    #[case("days since 2000-02-28", "noleap", 1.0, "2000-03-01 00:00:00")]
    #[case("days since 2001-02-28", "366_day", 1.0, "2001-02-29 00:00:00")]
    #[case("days since 2000-02-29", "360_day", 2.0, "2000-03-01 00:00:00")]
    #[case("days since 0000-01-01", "360_day", 719_999.0, "1999-12-30 00:00:00")]
    #[case("seconds since 1992-10-8 15:15:42.5 -6:00", "standard", 0.5, "1992-10-08 21:15:43")]
    #[case("minutes since 1979-01-01T00:00:00Z", "365_day", 525_600.0, "1980-01-01 00:00:00")]
    fn numbers_are_dates_of_the_calendar(
        #[case] unit: &str,
        #[case] calendar: &str,
        #[case] time: f64,
        #[case] text: &str,
    ) {
        let axis = axis(unit, calendar);
        assert_eq!(axis.text(time), text);
        assert!((axis.time(axis.instant(time)) - time).abs() < 1e-9);
        let (start, _) = axis.period(&text.replace(' ', "T")).unwrap();
        assert_eq!(axis.text(axis.time(start)), text);
    }

    #[rstest]
    fn dates_and_days_are_inverse(
        #[values("standard", "proleptic_gregorian", "julian", "noleap", "all_leap", "360_day")] name: &str,
    ) {
        let calendar = Calendar::named(name).unwrap();
        let first = calendar.first_day(1580);
        let mut before = calendar.date(first - 1);
        for days in first..first + 2000 {
            let date = calendar.date(days);
            assert!(date > before, "{name}: {date:?} after {before:?}");
            assert_eq!(calendar.days(date.0, date.1.into(), date.2.into()), Some(days), "{name}: {date:?}");
            before = date;
        }
        for days in (-1_000_000..1_000_000).step_by(997) {
            let (year, month, day) = calendar.date(days);
            assert_eq!(calendar.days(year, month.into(), day.into()), Some(days), "{name}");
        }
    }

    #[test]
    fn periods_last_as_long_as_what_is_given() {
        let axis = axis("hours since 2000-01-01", "standard");
        let hours = |text: &str| {
            let (start, end) = axis.period(text).unwrap();
            (axis.time(start), axis.time(end))
        };
        assert_eq!(hours("2000"), (0.0, 366.0 * 24.0));
        assert_eq!(hours("2000-02"), (744.0, 744.0 + 29.0 * 24.0));
        assert_eq!(hours("2000-12"), (335.0 * 24.0, 366.0 * 24.0));
        assert_eq!(hours("2000-01-02"), (24.0, 48.0));
        assert_eq!(hours("2000-01-02T06"), (30.0, 31.0));
        assert_eq!(hours("2000-01-02 06:30"), (30.5, 30.5 + 1.0 / 60.0));
        assert_eq!(hours("2000-01-02T06:00+02:00").0, 28.0);
        let date = axis.date(31.0 * 24.0 + 6.0);
        assert_eq!((date.day_of_year, date.year_days, date.fraction), (31.25, 366.0, 0.25));
    }

    #[rstest]
    #[case("months since 2000-01-01", "standard", "the unit of time is \"months since")]
    #[case("K", "standard", "expected one like")]
    #[case("days since 2001-02-29", "standard", "is no date of the calendar standard")]
    #[case("days since 1582-10-10", "standard", "is no date")]
    #[case("days since 2000-13-01", "360_day", "is no date")]
    #[case("days since 99999999999999999999-01-01", "julian", "is no date")]
    #[case("days since 2000-01-01 25:00", "julian", "is no date")]
    #[case("days since ", "julian", "is no date")]
    #[case("days since 2000-01-01", "martian", "the calendar of times is \"martian\"")]
    fn what_is_no_time_axis_is_refused(#[case] unit: &str, #[case] calendar: &str, #[case] expected: &str) {
        let unit = TimeUnit { unit: unit.to_owned(), calendar: Some(calendar.to_owned()) };
        let error = TimeAxis::new(&unit).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
