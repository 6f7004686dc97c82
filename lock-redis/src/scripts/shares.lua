-- The holds that do not exclude each other: shared ones, or permits. All of a name are of one mode. HOLDERS has the end of each in ms; one that is
-- over counts no more. RECORDS has the same owners, and of each what LOCK has of an exclusive hold, with the mode behind the format.

local function mode_of(value)
    return string.match(value, '^%d+(%a%d*) ') or 'x'
end

-- Makes the hold of the owner last that long from now on.
local function lasts(owner, life)
    redis.call('ZADD', HOLDERS, text(now + life), owner)
    -- Both end when the last hold does.
    if redis.call('PTTL', HOLDERS) < life then
        redis.call('PEXPIRE', HOLDERS, life)
        redis.call('PEXPIRE', RECORDS, life)
    end
end

-- `value` is that of a hold in any mode.
local function share(owner, value, life, mode)
    redis.call('HSET', RECORDS, owner, (string.gsub(value, '^(%d+)%S*', '%1' .. mode, 1)))
    lasts(owner, life)
end

local function unshare(owner)
    redis.call('ZREM', HOLDERS, owner)
    redis.call('HDEL', RECORDS, owner)
end

-- Removes holds that are over, at most so many. Returns how many that were.
local function unshare_over(most)
    local over = redis.call('ZRANGE', HOLDERS, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
    for _, owner in ipairs(over) do
        unshare(owner)
    end
    return #over
end

-- For how long the hold of the owner lasts, not above 0 if there is none, and its record.
local function shared_by(owner)
    return (tonumber(redis.call('ZSCORE', HOLDERS, owner)) or now) - now, redis.call('HGET', RECORDS, owner)
end

-- Of so many holds that last longest, the one that ends first: its record, and how long it lasts. Nil if there are fewer.
local function last_of(most)
    local last = redis.call('ZRANGE', HOLDERS, -most, -most, 'WITHSCORES')
    local left = (tonumber(last[2]) or now) - now
    if left > 0 then
        return redis.call('HGET', RECORDS, last[1]) or '', left
    end
end
