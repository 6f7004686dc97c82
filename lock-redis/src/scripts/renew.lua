local more = 0
if not value then
    -- Refused by a replica: what it lacks, its primary may have. Elsewhere there is nothing to delete.
    redis.call('DEL', LOCK)
    more = serve()
end
return { 'lost', stamp, more }
